//! `cargo xtask dist`: packages for Debian and for systems with rpm, an archive, a bill of
//! materials and checksums, of the commit that is checked out.
//!
//! | file | holds |
//! | --- | --- |
//! | `checkout.rs` | a clean copy of the commit |
//! | `build.rs` | the build in that copy, and its places |
//! | `table.rs` | `packaging/packages.toml` |
//! | `tree.rs` | the files of a package, as they will lie below `/` |
//! | `formats.rs` | .deb and .rpm of a tree, by cargo-deb and cargo-generate-rpm |
//! | `archive.rs` | the archive: a tar with sorted names and one time |
//! | `materials.rs` | the bill of materials |
//! | `sums.rs` | the checksums, and two of them compared |
//! | `lint.rs` | lintian and rpmlint |
//! | `tools.rs` | the tools, which are installed if need be |
//!
//! Two runs give the same bytes: the build knows the commit's time (`SOURCE_DATE_EPOCH`) instead of
//! the clock, no path of the machine (`--remap-path-prefix`), and the versions of `Cargo.lock`. The
//! compilers and libraries of the machine are what else decides, so only runs on equal machines are
//! equal.

mod archive;
mod build;
mod checkout;
mod formats;
mod lint;
mod materials;
mod sums;
mod table;
mod tools;
mod tree;

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use clap::Args;

use crate::workspace::Workspace;
use build::Build;
use checkout::{Checkout, Commit};
use sums::Sums;
use table::{Layout, Table};
use tools::Tools;
use tree::Tree;

/// Make the packages of the commit that is checked out: .deb, .rpm, an archive, SBOM and SHA256SUMS
///
/// Builds a clean copy of the commit, with optimisation and RDMA, from scratch the first time: some
/// minutes. Changes that are not committed are not in it, and are named. Needs Debian, and installs
/// the missing tools: packages by apt-get, cargo-deb and cargo-generate-rpm by cargo.
///
/// Exit status: 0; 1 when something failed, two builds differ, or a lint found something.
#[derive(Debug, Args)]
#[command(verbatim_doc_comment)]
pub(crate) struct DistArgs {
    /// Where the packages go [default: dist in the directory of what is built]
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,

    /// Build once more, in a copy at another path, and compare the checksums
    #[arg(long)]
    twice: bool,

    /// Judge the packages by lintian and rpmlint; packaging/lint has the exceptions with reasons
    #[arg(long)]
    lint: bool,
}

impl DistArgs {
    /// Makes the packages.
    pub(crate) fn run(&self) -> Result<i32> {
        let workspace = Workspace::find()?;
        let tools = Tools::ensure(self.lint)?;
        let commit = Commit::of(&workspace)?;
        let out = match &self.out {
            Some(out) => std::path::absolute(out)?,
            None => workspace.target.join("dist"),
        };
        let scratch = workspace.target.join("dist-build");
        let first = scratch.join("first");
        let sums = packages(&commit, &first, &out, &tools)?;
        println!("{}", sums.text().trim_end());
        let mut code = 0;
        if self.twice {
            let place = scratch.join("second/at/another/path");
            let second = packages(&commit, &place, &place.join("dist"), &tools)?;
            let differ = sums.differences(&second);
            for line in &differ {
                println!("{line}");
            }
            let verdict = if differ.is_empty() { "the same bytes" } else { "they differ" };
            println!("two builds, in {} and {}: {verdict}", first.display(), place.display());
            code = i32::from(!differ.is_empty());
        }
        if self.lint {
            code |= lint::judge(&workspace.root.join("packaging/lint"), &out)?;
        }
        println!("{}", out.display());
        Ok(code)
    }
}

/// Makes everything in a copy of the commit at `place`, and leaves it in `out`.
fn packages(commit: &Commit, place: &Path, out: &Path, tools: &Tools) -> Result<Sums> {
    let checkout = Checkout::make(commit, &place.join("rblk"))?;
    let build = Build::run(&checkout, &place.join("built"))?;
    let table = Table::read(&checkout.root.join("packaging/packages.toml"))?;
    remake(out)?;
    let mut whole = Tree::new(place.join("tree/whole"))?;
    for package in &table.packages {
        let mut formats = Vec::new();
        for layout in [Layout::Deb, Layout::Rpm] {
            let root = place.join("tree").join(layout.name()).join(&package.name);
            let mut tree = Tree::new(root)?;
            if !tree.fill(package, layout, &checkout, &build)? {
                eprintln!(
                    "dist: {}: its files are not there, so there is no package",
                    package.name
                );
                break;
            }
            formats.push((layout, tree));
        }
        if formats.is_empty() {
            continue;
        }
        whole.fill(package, Layout::Archive, &checkout, &build)?;
        for (layout, tree) in &formats {
            formats::write(package, *layout, tree, &checkout, (tools, out))?;
        }
    }
    archive::write(&whole, &checkout, out)?;
    materials::write(&checkout, out)?;
    let sums = Sums::of(out)?;
    fs::write(out.join("SHA256SUMS"), sums.text()).context("cannot write SHA256SUMS")?;
    Ok(sums)
}

/// Makes a directory without content.
fn remake(directory: &Path) -> Result<()> {
    if directory.exists() {
        fs::remove_dir_all(directory)
            .with_context(|| format!("cannot empty {}", directory.display()))?;
    }
    fs::create_dir_all(directory).with_context(|| format!("cannot make {}", directory.display()))
}

/// The kind of this machine, as rpm and as Debian name it; and the name of the directory of
/// libraries on Debian.
fn machine() -> Result<(&'static str, &'static str, &'static str)> {
    match std::env::consts::ARCH {
        "x86_64" => Ok(("x86_64", "amd64", "x86_64-linux-gnu")),
        "aarch64" => Ok(("aarch64", "arm64", "aarch64-linux-gnu")),
        other => bail!("there are no packages for {other}"),
    }
}
