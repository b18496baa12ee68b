//! `rblk-pages DIR`: writes the man pages and the completions of shells, for the packages.
//!
//! | file | writes |
//! | --- | --- |
//! | `commands.rs` | section 8: a page for each command, from the command line's own description |
//! | `keys.rs` | section 5: a page for each kind of file, from the descriptions of the keys |
//! | `overview.rs` | section 7: `rblk(7)`, from `man/rblk.7` |
//! | `page.rs` | the parts that pages have in common |
//! | `completions.rs` | completions: bash, zsh and fish ask the program itself |
//!
//! `cargo xtask dist` runs it and puts its files into the packages.
#![forbid(unsafe_code)]

mod commands;
mod completions;
mod keys;
mod overview;
mod page;

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::Context;
use clap::Parser;

/// Writes the man pages and completions of rblk.
#[derive(Debug, Parser)]
#[command(name = "rblk-pages")]
struct Cli {
    /// Where they go: DIR/man and DIR/completions.
    #[arg(value_name = "DIR")]
    out: PathBuf,
}

fn main() -> anyhow::Result<()> {
    let Cli { out } = Cli::parse();
    for (directory, files) in
        [("man", pages()?), ("completions", completions::all().context("completions")?)]
    {
        write(&out.join(directory), files)?;
    }
    Ok(())
}

/// Every page: the name of its file, and its text.
fn pages() -> anyhow::Result<Vec<(String, String)>> {
    let mut pages = keys::pages();
    pages.push(("rblk.7".to_owned(), overview::page()));
    for command in [rblk_cli::target::command(), rblk_cli::initiator::command()] {
        pages.extend(commands::pages(command)?);
    }
    Ok(pages)
}

fn write(directory: &Path, files: Vec<(String, String)>) -> anyhow::Result<()> {
    fs::create_dir_all(directory)?;
    for (name, text) in files {
        let path = directory.join(name);
        fs::write(&path, text).with_context(|| path.display().to_string())?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    #[test]
    fn man_shows_each_page_without_a_warning() {
        let directory = tempfile::tempdir().unwrap();
        let pages = pages().unwrap();
        let names: Vec<&str> = pages.iter().map(|(name, _)| &**name).collect();
        for name in ["rblk.7", "rblk-target.8", "rblk-target-host-add.8", "rblk-mount.toml.5"] {
            assert!(names.contains(&name), "{names:?}");
        }
        assert!(!names.iter().any(|name| name.contains("help")), "{names:?}");
        write(directory.path(), pages.clone()).unwrap();
        for (name, text) in pages {
            if text.starts_with(".so ") {
                continue;
            }
            let path = directory.path().join(&name);
            let mut groff = Command::new("groff");
            groff.args(["-man", "-Tutf8", "-ww", "-z", "-rLL=78n", "-Wmac"]).arg(&path);
            let said = groff.output().expect("groff, which Debian's package groff-base has");
            let text = String::from_utf8_lossy(&said.stderr).into_owned();
            assert!(said.status.success() && text.is_empty(), "{name}: {text}");
        }
    }
}
