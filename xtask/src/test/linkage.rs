//! Which programs link the RDMA libraries: the daemons and nothing else.

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use anyhow::{Result, bail};

use crate::process;

/// The libraries in question.
const LIBRARIES: [&str; 2] = ["libibverbs.so", "librdmacm.so"];

/// The programs, and whether they link them.
const PROGRAMS: [(&str, bool); 4] = [
    ("rblk-target", false),
    ("rblk-initiator", false),
    ("rblk-targetd", true),
    ("rblk-initiatord", true),
];

/// Checks the programs in `dir`.
pub(crate) fn check(dir: &Path) -> Result<()> {
    for (program, linked) in PROGRAMS {
        let path = dir.join(program);
        let ldd = process::output(Command::new("ldd").arg(&path), Duration::from_secs(30))?;
        if let Some(problem) = problem(&ldd, linked) {
            bail!("{program} {problem}\n{ldd}");
        }
        println!(
            "{program}: {} the RDMA libraries",
            if linked { "links" } else { "does not link" }
        );
    }
    Ok(())
}

fn problem(ldd: &str, linked: bool) -> Option<String> {
    LIBRARIES.iter().find_map(|library| {
        let line = ldd.lines().find(|line| line.trim_start().starts_with(library));
        match (line, linked) {
            (Some(_), false) => Some(format!(
                "links {library}*: it must run where no RDMA library is installed; keep the feature \
                 `verbs` out of what it uses"
            )),
            (None, true) => Some(format!("does not link {library}*: was it built without `verbs`?")),
            (Some(line), true) if line.contains("not found") => {
                Some(format!("does not find {library}*"))
            }
            _ => None,
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const BOTH: &str = "\
\tlinux-vdso.so.1 (0x1)
\tlibibverbs.so.1 => /lib/libibverbs.so.1 (0x2)
\tlibrdmacm.so.1 => /lib/librdmacm.so.1 (0x3)
";

    #[test]
    fn each_kind_is_held_to_its_own_rule() {
        let none = "\tlibc.so.6 => /lib/libc.so.6 (0x1)\n";
        assert_eq!(problem(BOTH, true), None);
        assert_eq!(problem(none, false), None);
        assert!(problem(BOTH, false).unwrap().contains("libibverbs"));
        assert!(problem(none, true).unwrap().contains("does not link"));
        assert!(problem("\tlibibverbs.so.1 => not found\n", true).unwrap().contains("find"));
    }
}
