//! Circles of imports: files of one crate that need each other.
//!
//! Files that need each other can be read only together. A module and those below it are one thing
//! in parts, so an import between an ancestor and a descendant makes no circle. A name that a
//! module passes on from elsewhere is an import of the file that defines the name.

mod tokens;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};

use super::widths::rust_files;
use tokens::{Named, paths};

/// How many modules may pass a name on, one to the next.
const PASSED_ON_MAX: usize = 8;

/// The names of a module from the root of its crate; none for the root itself.
type Module = Vec<String>;

/// A crate: its modules, and the paths that each names.
#[derive(Debug, Default)]
struct Crate {
    modules: BTreeMap<Module, Vec<Named>>,
}

/// Checks every crate below `root`.
pub(crate) fn check(root: &Path) -> Result<()> {
    let mut circles = Vec::new();
    for root_file in root_files(root)? {
        let directory = root_file.parent().context("a root file without a directory")?;
        let of_crate = read(&root_file, directory)?;
        let name = directory.strip_prefix(root).unwrap_or(directory).display().to_string();
        for circle in of_crate.circles() {
            let names: Vec<String> = circle.iter().map(|module| module.join("::")).collect();
            circles.push(format!("{name}: {}", names.join(" -> ")));
        }
    }
    if circles.is_empty() {
        return Ok(());
    }
    bail!(
        "{} circles of imports; move what both sides need into a file of its own:\n{}",
        circles.len(),
        circles.join("\n")
    )
}

/// The first file of each crate: `src/lib.rs`, else `src/main.rs`, and `main.rs` of test programs.
fn root_files(root: &Path) -> Result<Vec<PathBuf>> {
    let is_root = |path: &PathBuf| match path.file_name().and_then(|name| name.to_str()) {
        Some("lib.rs") => true,
        Some("main.rs") => !path.with_file_name("lib.rs").exists(),
        _ => false,
    };
    Ok(rust_files(root)?.into_iter().filter(is_root).collect())
}

/// Reads the modules in the directory of a crate's first file.
fn read(root_file: &Path, directory: &Path) -> Result<Crate> {
    let mut of_crate = Crate::default();
    for file in rust_files(directory)? {
        let Some(module) = module_of(&file, root_file, directory) else { continue };
        let text = fs::read_to_string(&file).with_context(|| file.display().to_string())?;
        of_crate.modules.insert(module, paths(&text));
    }
    Ok(of_crate)
}

/// The module of a file; none for tests, and for the first files of other programs.
fn module_of(file: &Path, root_file: &Path, directory: &Path) -> Option<Module> {
    if file == root_file {
        return Some(Module::new());
    }
    let below = file.strip_prefix(directory).ok()?.with_extension("");
    let mut module: Module = below.iter().map(|name| name.to_string_lossy().into_owned()).collect();
    if module.last().is_some_and(|name| name == "mod") {
        module.pop();
    }
    let is_other = module == ["main"] || module.first().is_some_and(|name| name == "bin");
    let is_test = module.iter().any(|name| name == "tests");
    (!is_other && !is_test).then_some(module)
}

impl Crate {
    /// One path through each set of modules that need each other.
    fn circles(&self) -> Vec<Vec<&Module>> {
        let edges = self.edges();
        let mut circles = Vec::new();
        let mut seen: BTreeSet<&Module> = BTreeSet::new();
        for module in self.modules.keys() {
            if seen.contains(module) {
                continue;
            }
            if let Some(circle) = shortest_circle(module, &edges) {
                let onward = reached(module, &edges);
                let all =
                    onward.into_iter().filter(|other| reached(other, &edges).contains(module));
                seen.extend(all);
                circles.push(circle);
            }
        }
        circles
    }

    /// The modules that each needs, without its ancestors and descendants.
    fn edges(&self) -> BTreeMap<&Module, BTreeSet<&Module>> {
        let related = |a: &Module, b: &Module| a.starts_with(b) || b.starts_with(a);
        self.modules
            .iter()
            .map(|(module, named)| {
                let needs = named.iter().filter_map(|path| self.resolve(module, path, 0));
                (module, needs.filter(|needed| !related(module, needed)).collect())
            })
            .collect()
    }

    /// The module that defines what `path` means within `module`; none for other crates.
    fn resolve(&self, module: &Module, path: &Named, passed_on: usize) -> Option<&Module> {
        let mut words = path.words.iter().map(String::as_str).peekable();
        let mut here: Module = match words.next()? {
            "crate" => Module::new(),
            "super" => module[..module.len().checked_sub(1)?].to_vec(),
            "self" => module.clone(),
            child => {
                let child = below(module, child);
                self.modules.contains_key(&child).then_some(child)?
            }
        };
        for word in words {
            if word == "super" {
                here.pop()?;
                continue;
            }
            let child = below(&here, word);
            if self.modules.contains_key(&child) {
                here = child;
                continue;
            }
            // A name within `here`, which may have it from elsewhere.
            let passes = |named: &&Named| named.imported_as.as_deref() == Some(word);
            let from = self.modules.get(&here)?.iter().find(passes);
            let from = from.filter(|named| passed_on < PASSED_ON_MAX && *named != path);
            if let Some(found) = from.and_then(|named| self.resolve(&here, named, passed_on + 1)) {
                return Some(found);
            }
            break;
        }
        self.modules.get_key_value(&here).map(|(module, _)| module)
    }
}

fn below(module: &Module, child: &str) -> Module {
    let mut module = module.clone();
    module.push(child.to_owned());
    module
}

type Edges<'a> = BTreeMap<&'a Module, BTreeSet<&'a Module>>;

/// Everything that `start` needs, directly or not.
fn reached<'a>(start: &Module, edges: &Edges<'a>) -> BTreeSet<&'a Module> {
    let mut found = BTreeSet::new();
    let mut next: Vec<&Module> = edges.get(start).into_iter().flatten().copied().collect();
    while let Some(module) = next.pop() {
        if let Some((module, needs)) = edges.get_key_value(module)
            && found.insert(*module)
        {
            next.extend(needs.iter().copied());
        }
    }
    found
}

/// The shortest way from `start` back to `start`.
fn shortest_circle<'a>(start: &'a Module, edges: &Edges<'a>) -> Option<Vec<&'a Module>> {
    let mut came_from: BTreeMap<&Module, &Module> = BTreeMap::new();
    let mut next = VecDeque::from([start]);
    while let Some(module) = next.pop_front() {
        for &needed in edges.get(module).into_iter().flatten() {
            if needed == start {
                let mut circle = vec![start, module];
                while let Some(&before) = circle.last().and_then(|last| came_from.get(last)) {
                    circle.push(before);
                }
                circle.reverse();
                return Some(circle);
            }
            if !came_from.contains_key(needed) {
                came_from.insert(needed, module);
                next.push_back(needed);
            }
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    fn circles(files: &[(&str, &str)]) -> Vec<String> {
        let module = |name: &str| -> Module {
            name.split("::").filter(|word| !word.is_empty()).map(str::to_owned).collect()
        };
        let modules = files.iter().map(|(name, text)| (module(name), paths(text)));
        let of_crate = Crate { modules: modules.collect() };
        let circles = of_crate.circles();
        let name = |module: &&Module| module.join("::");
        circles.iter().map(|c| c.iter().map(name).collect::<Vec<_>>().join(" -> ")).collect()
    }

    #[test]
    fn files_that_need_each_other_are_a_circle() {
        let files = [
            ("", "mod a; mod b; mod c;"),
            ("a", "use crate::b::B;"),
            ("b", "use std::io; fn f() { super::c::g() }"),
            ("c", "use crate::a::A;"),
            ("d", "use crate::a::A;"),
        ];
        assert_eq!(circles(&files), ["a -> b -> c -> a"]);
        assert_eq!(circles(&files[..3]), Vec::<String>::new());
    }

    #[test]
    fn a_parent_and_its_children_may_need_each_other() {
        let files = [
            ("", "mod a;"),
            ("a", "mod x; mod y; use x::X; pub use y::Y; struct Own;"),
            ("a::x", "use super::Own;"),
            ("a::y", "use crate::a::Own;"),
        ];
        assert_eq!(circles(&files), Vec::<String>::new());
    }

    #[test]
    fn a_name_that_is_passed_on_belongs_to_the_file_that_defines_it() {
        let files = [
            ("a", "mod x; mod y; pub use x::X; pub use y::Y as Z;"),
            ("a::x", "use super::Z;"),
            ("a::y", "use super::X;"),
            ("b", "use crate::a::X;"),
        ];
        assert_eq!(circles(&files), ["a::x -> a::y -> a::x"]);
    }

    #[test]
    fn a_module_that_passes_itself_on_ends() {
        let files = [("a", "pub use crate::b::X;"), ("b", "pub use crate::a::X;")];
        assert_eq!(circles(&files), ["a -> b -> a"]);
    }

    #[test]
    fn a_crate_is_read_from_its_files() {
        let directory = tempfile::tempdir().unwrap();
        let write = |name: &str, text: &str| {
            let path = directory.path().join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        };
        write("k/src/lib.rs", "mod a; mod b;");
        write("k/src/main.rs", "fn main() {}");
        write("k/src/a/mod.rs", "use crate::b::B;");
        write("k/src/a/tests.rs", "use crate::b::B;");
        write("k/src/b.rs", "pub struct B;");
        check(directory.path()).unwrap();
        write("k/src/b.rs", "use crate::a::A;");
        let error = check(directory.path()).unwrap_err().to_string();
        assert!(error.ends_with("k/src: a -> b -> a"), "{error}");
    }
}
