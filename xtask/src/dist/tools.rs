//! [`Tools`]: the programs that make packages, installed if need be.

use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result};

use crate::lab::host::{Package, ensure_installed};
use crate::{packages, process};

/// Limit on the installation of one tool.
const LIMIT: Duration = Duration::from_secs(60 * 60);

/// Tools of cargo, with their versions: another version may give other bytes.
const OF_CARGO: [(&str, &str); 2] = [("cargo-deb", "3.8.0"), ("cargo-generate-rpm", "0.21.1")];

/// What making and judging packages needs of Debian.
const MAKE: &[Package] = &[
    Package { name: "git", why: "the commit to build" },
    Package { name: "dpkg-dev", why: "dpkg-shlibdeps names the libraries of a program" },
    Package { name: "binutils", why: "strip takes the symbols out of programs" },
    Package { name: "xz-utils", why: "compresses the archive" },
    Package { name: "fio", why: "the engine is for this version of it" },
];
const JUDGE: &[Package] = &[
    Package { name: "lintian", why: "judges packages of Debian" },
    Package { name: "rpmlint", why: "judges packages of rpm" },
    Package { name: "man-db", why: "lintian shows pages by it" },
];

/// The tools of cargo, in a directory of their own.
#[derive(Debug)]
pub(crate) struct Tools {
    root: PathBuf,
}

impl Tools {
    /// Installs what is missing.
    pub(crate) fn ensure(judge: bool) -> Result<Self> {
        ensure_installed(packages::BUILD)?;
        ensure_installed(MAKE)?;
        if judge {
            ensure_installed(JUDGE)?;
        }
        let base = match std::env::var_os("XDG_CACHE_HOME").filter(|value| !value.is_empty()) {
            Some(base) => PathBuf::from(base),
            None => {
                PathBuf::from(std::env::var_os("HOME").context("HOME is not set")?).join(".cache")
            }
        };
        let tools = Self { root: base.join("rblk-dist/tools") };
        for (name, version) in OF_CARGO {
            let said = Command::new(tools.program(name)).arg("--version").output();
            let is_there = said.is_ok_and(|said| {
                String::from_utf8_lossy(&said.stdout).split_whitespace().any(|word| word == version)
            });
            if !is_there {
                eprintln!("dist: installing {name} {version}");
                let mut cargo = Command::new("cargo");
                cargo.args(["install", "--locked", "--force", "--root"]).arg(&tools.root);
                cargo.args([name, "--version", version]).current_dir("/");
                process::output(&mut cargo, LIMIT)?;
            }
        }
        Ok(tools)
    }

    /// The path of a tool.
    pub(crate) fn program(&self, name: &str) -> PathBuf {
        self.root.join("bin").join(name)
    }
}
