//! Which kernel modules must be loaded, in which order, for a set of module names.
//!
//! Reads `modules.dep` and `modules.builtin` as depmod(8) writes them: paths relative to the
//! module directory, a module's dependencies listed from the nearest to the deepest.

use std::collections::{HashMap, HashSet};

use anyhow::{Result, bail};

/// The dependency table of one kernel.
#[derive(Debug, Default)]
pub(crate) struct Table {
    paths: HashMap<String, (String, Vec<String>)>,
    builtin: HashSet<String>,
}

impl Table {
    /// Parses the two files' text.
    pub(crate) fn parse(dep: &str, builtin: &str) -> Self {
        let mut paths = HashMap::new();
        for line in dep.lines() {
            if let Some((path, needs)) = line.split_once(':') {
                let needs = needs.split_whitespace().map(str::to_owned).collect();
                paths.insert(name_of(path), (path.to_owned(), needs));
            }
        }
        Table { paths, builtin: builtin.lines().map(name_of).collect() }
    }

    /// The files to insert, every dependency before what needs it, nothing twice. `a|b` is the
    /// first of these that the kernel has: modules get new names.
    pub(crate) fn load_order(&self, names: &[&str]) -> Result<Vec<String>> {
        let mut order = Vec::new();
        let mut seen = HashSet::new();
        for name in names {
            let names = name.replace('-', "_");
            let has = |name: &&str| self.paths.contains_key(*name) || self.builtin.contains(*name);
            let Some(name) = names.split('|').find(has) else {
                bail!("this kernel has no module `{names}`; choose another with --kernel");
            };
            if let Some((path, _)) = self.paths.get(name) {
                self.visit(path, &mut seen, &mut order);
            }
        }
        Ok(order)
    }

    fn visit(&self, path: &str, seen: &mut HashSet<String>, order: &mut Vec<String>) {
        // Marked before its dependencies are visited: a damaged table with a cycle must end, too.
        if !seen.insert(path.to_owned()) {
            return;
        }
        if let Some((_, needs)) = self.paths.get(&name_of(path)) {
            for need in needs.iter().rev() {
                self.visit(need, seen, order);
            }
        }
        order.push(path.to_owned());
    }
}

/// `kernel/fs/9p/9p.ko.xz` is `9p`; the kernel knows no difference between `-` and `_`.
fn name_of(path: &str) -> String {
    let file = path.rsplit('/').next().unwrap_or(path);
    file.split(".ko").next().unwrap_or(file).replace('-', "_")
}

#[cfg(test)]
mod tests {
    use super::*;

    const DEP: &str = "\
kernel/fs/netfs/netfs.ko.xz:
kernel/net/9p/9pnet.ko.xz: kernel/fs/netfs/netfs.ko.xz
kernel/fs/9p/9p.ko.xz: kernel/net/9p/9pnet.ko.xz kernel/fs/netfs/netfs.ko.xz
kernel/drivers/net/dummy-net.ko.xz:
";

    #[test]
    fn dependencies_come_first_and_once() {
        let table = Table::parse(DEP, "");
        assert_eq!(
            table.load_order(&["9p", "9pnet"]).unwrap(),
            ["kernel/fs/netfs/netfs.ko.xz", "kernel/net/9p/9pnet.ko.xz", "kernel/fs/9p/9p.ko.xz"]
        );
    }

    #[test]
    fn dash_and_underscore_are_one() {
        let table = Table::parse(DEP, "");
        assert_eq!(
            table.load_order(&["dummy-net"]).unwrap(),
            table.load_order(&["dummy_net"]).unwrap()
        );
    }

    #[test]
    fn a_builtin_needs_no_file_and_a_missing_module_is_named() {
        let table = Table::parse(DEP, "kernel/drivers/virtio/virtio_pci.ko\n");
        assert!(table.load_order(&["virtio_pci"]).unwrap().is_empty());
        assert!(table.load_order(&["siw"]).unwrap_err().to_string().contains("siw"));
    }

    #[test]
    fn of_several_names_the_first_that_is_there_counts() {
        let table = Table::parse("a.ko:\nb.ko:\n", "c.ko\n");
        assert_eq!(table.load_order(&["x|b|a"]).unwrap(), ["b.ko"]);
        assert!(table.load_order(&["c|a"]).unwrap().is_empty());
        assert!(table.load_order(&["x|y"]).unwrap_err().to_string().contains("x|y"));
    }

    #[test]
    fn a_cycle_ends() {
        let table = Table::parse("a.ko: b.ko\nb.ko: a.ko\n", "");
        assert_eq!(table.load_order(&["a"]).unwrap(), ["b.ko", "a.ko"]);
    }
}
