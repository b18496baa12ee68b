//! [`judge`]: lintian and rpmlint about the packages.
//!
//! Each exception has its reason, in a comment: `packaging/lint/NAME.lintian-overrides` is in the
//! package, where lintian looks for it, and `packaging/lint/rpmlint.toml` is for rpmlint.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result};

use crate::process;

/// Limit on one run.
const LIMIT: Duration = Duration::from_secs(20 * 60);

/// Prints what both say; gives 0 if they object to nothing.
pub(crate) fn judge(exceptions: &Path, directory: &Path) -> Result<i32> {
    let mut lintian = Command::new("lintian");
    lintian.args(["--no-cfg", "--allow-root", "--fail-on", "error,warning,info"]);
    lintian.args(["--display-info", "--tag-display-limit", "0"]).args(files(directory, "deb")?);
    let mut rpmlint = Command::new("rpmlint");
    rpmlint
        .arg("--strict")
        .arg("--config")
        .arg(exceptions.join("rpmlint.toml"))
        .args(files(directory, "rpm")?);
    let mut worst = 0;
    for command in [&mut lintian, &mut rpmlint] {
        let name = command.get_program().to_string_lossy().into_owned();
        let (code, said) = process::both(command.env("LC_ALL", "C.UTF-8"), LIMIT)?;
        let said = String::from_utf8_lossy(&said);
        println!("{name}: exit code {code}");
        for line in said.lines().filter(|line| !line.trim().is_empty()) {
            println!("  {line}");
        }
        worst |= i32::from(code != 0);
    }
    Ok(worst)
}

/// The files of a kind, in order.
fn files(directory: &Path, extension: &str) -> Result<Vec<PathBuf>> {
    let entries = fs::read_dir(directory).with_context(|| directory.display().to_string())?;
    let mut files: Vec<PathBuf> = entries.flatten().map(|entry| entry.path()).collect();
    files.retain(|path| path.extension().is_some_and(|end| end == extension));
    files.sort();
    Ok(files)
}
