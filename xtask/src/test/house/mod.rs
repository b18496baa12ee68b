//! House rules: counts of the shape of the code, and the bound of each count ([`BOUNDS`]).
//!
//! `cargo xtask house` prints the counts.

mod arrows;
mod names;
mod prose;
mod rooms;

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use clap::Args;

use super::widths::rust_files;
use crate::workspace::Workspace;

/// The bounds of this tree.
const BOUNDS: Bounds = Bounds {
    // Files in `src/` itself, besides lib.rs and main.rs.
    loose: &[("target", 0), ("initiator", 0), ("operate", 0), ("cli", 0)],
    // Files in one directory.
    room: 24,
    // Directories with more files.
    rooms_above: &[],
    // Types that are defined more than once.
    types: 60,
    // In 1000 lines of comments.
    what: 20,
    who: 5,
    it: 10,
};

/// The file names that stand more than once: at most 30 of them.
const NAMES: &str = "xtask/src/test/house/names.txt";

/// The directories of the product; those that are not there are passed over.
const PRODUCT: [&str; 8] =
    ["protocol", "runtime", "fabric", "config", "operate", "target", "initiator", "cli"];

/// The most that each count may be.
#[derive(Debug)]
struct Bounds {
    loose: &'static [(&'static str, usize)],
    room: usize,
    rooms_above: &'static [(&'static str, usize)],
    types: usize,
    what: usize,
    who: usize,
    it: usize,
}

/// Print what the house rules count, each count with its bound
///
/// Exit status: 0 when every count is within its bound, 1 otherwise.
#[derive(Debug, Args)]
#[command(verbatim_doc_comment)]
pub(crate) struct HouseArgs {
    /// Take the file names that no longer stand more than once out of the list of exceptions
    #[arg(long)]
    write: bool,
}

impl HouseArgs {
    /// Prints the counts.
    pub(crate) fn run(&self) -> Result<i32> {
        let workspace = Workspace::find()?;
        if self.write {
            let list = workspace.root.join(NAMES);
            let known = fs::read_to_string(&list).unwrap_or_default();
            let kept = names::shrunk(&known, &names::files(&sources(&workspace.root)?))?;
            fs::write(&list, kept).with_context(|| list.display().to_string())?;
        }
        match check(&workspace) {
            Ok(()) => Ok(0),
            Err(error) => {
                println!("{error:#}");
                Ok(1)
            }
        }
    }
}

/// A source of the product or of the bench, without tests.
#[derive(Debug)]
struct Source {
    /// From the root of the workspace.
    path: PathBuf,
    text: String,
}

impl Source {
    /// The first directory of its path.
    fn top(&self) -> &str {
        self.path.iter().next().and_then(|name| name.to_str()).unwrap_or_default()
    }

    fn is_product(&self) -> bool {
        PRODUCT.contains(&self.top())
    }

    fn name(&self) -> &str {
        self.path.file_name().and_then(|name| name.to_str()).unwrap_or_default()
    }
}

/// Checks the tree, and prints each count.
///
/// # Errors
/// Names each rule that is broken.
pub(super) fn check(workspace: &Workspace) -> Result<()> {
    let sources = sources(&workspace.root)?;
    let product: Vec<&Source> = sources.iter().filter(|source| source.is_product()).collect();
    let mut broken = arrows::broken(workspace)?;
    broken.extend(rooms::broken(&product, &BOUNDS));
    let list = workspace.root.join(NAMES);
    let known = fs::read_to_string(&list).with_context(|| list.display().to_string())?;
    broken.extend(names::broken(&known, &names::files(&sources))?);
    let types = names::types(&product);
    bound("type names that are defined more than once", types.len(), BOUNDS.types, &mut broken);
    let prose = prose::Rates::of(&sources);
    bound("\"what\" in 1000 comment lines", prose.what, BOUNDS.what, &mut broken);
    bound("who-words in 1000 comment lines", prose.who, BOUNDS.who, &mut broken);
    let it = "lines of comments that begin with It, They or The same, of 1000";
    bound(it, prose.it, BOUNDS.it, &mut broken);
    if broken.is_empty() {
        return Ok(());
    }
    bail!("{} house rules are broken:\n{}", broken.len(), broken.join("\n"))
}

/// Prints a count; one above its bound is broken.
fn bound(what: &str, count: usize, most: usize, broken: &mut Vec<String>) {
    println!("{what}: {count} (at most {most})");
    if count > most {
        broken.push(format!("{what}: {count}, and at most {most} are allowed"));
    }
}

/// The sources of the product and of the bench.
fn sources(root: &Path) -> Result<Vec<Source>> {
    let mut sources = Vec::new();
    for top in PRODUCT.iter().chain(&["bench"]) {
        let directory = root.join(top);
        if !directory.join("Cargo.toml").exists() {
            continue;
        }
        for file in rust_files(&directory)? {
            let path = file.strip_prefix(root).unwrap_or(&file).to_owned();
            if !is_test(&path) {
                let text = fs::read_to_string(&file).with_context(|| file.display().to_string())?;
                sources.push(Source { path, text });
            }
        }
    }
    Ok(sources)
}

fn is_test(path: &Path) -> bool {
    let is_directory = path.iter().skip(1).any(|name| name == "tests" || name == "benches");
    is_directory || path.file_name().is_some_and(|name| name == "tests.rs")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tests_are_no_product() {
        for (path, expected) in [
            ("target/src/store/mod.rs", false),
            ("target/src/store/tests/mod.rs", true),
            ("target/src/tests.rs", true),
            ("fabric/tests/soft.rs", true),
        ] {
            assert_eq!(is_test(Path::new(path)), expected, "{path}");
        }
    }

    #[test]
    fn a_count_above_its_bound_is_broken() {
        let mut broken = Vec::new();
        bound("a", 3, 3, &mut broken);
        bound("b", 4, 3, &mut broken);
        assert_eq!(broken, ["b: 4, and at most 3 are allowed"]);
    }
}
