//! [`Build`]: the programs, the library, the engine of fio and the pages of a checkout.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, bail};

use super::checkout::Checkout;
use super::remake;
use crate::fio_engine::FioEngineArgs;
use crate::library::{ARCHIVE, LibraryArgs};
use crate::process;

/// Limit on the build: two slow processors, and every crate.
const LIMIT: Duration = Duration::from_secs(90 * 60);
/// Limit on one of the small programs.
const SHORT: Duration = Duration::from_secs(10 * 60);
/// The programs of the packages.
const PROGRAMS: [&str; 4] = ["rblk-target", "rblk-targetd", "rblk-initiator", "rblk-initiatord"];
/// The crates to build.
const CRATES: [&str; 5] =
    ["rblk-cli", "rblk-target", "rblk-initiator", "rblk-capi", "rblk-packaging"];

/// The places of what was built.
#[derive(Debug)]
pub(crate) struct Build {
    /// The programs, stripped.
    pub(crate) programs: PathBuf,
    /// The library, as `cargo xtask library` leaves it.
    pub(crate) library: PathBuf,
    /// The engine of fio.
    pub(crate) fio: PathBuf,
    /// The version of the fio that the engine is for.
    pub(crate) fio_version: String,
    /// What `rblk-pages` wrote.
    pub(crate) pages: PathBuf,
}

impl Build {
    /// Builds into `out`.
    pub(crate) fn run(checkout: &Checkout, out: &Path) -> Result<Self> {
        remake(out)?;
        let build = Self {
            programs: out.join("programs"),
            library: out.join("library"),
            fio: out.join("fio"),
            fio_version: fio_version()?,
            pages: out.join("pages"),
        };
        for directory in [&build.programs, &build.fio, &build.pages] {
            fs::create_dir_all(directory)?;
        }
        let release = cargo(checkout)?;
        for name in PROGRAMS {
            let program = build.programs.join(name);
            fs::copy(release.join(name), &program)
                .with_context(|| format!("cannot copy {name}"))?;
            strip(&program)?;
        }
        let workspace = checkout.workspace();
        let archive = release.join(ARCHIVE);
        LibraryArgs::of_built(build.library.clone(), "/usr").build_in(&workspace, &archive)?;
        let library = build.library.join("lib/librblk.so.1");
        strip(&library)?;
        let engine = build.fio.join("librblk_fio.so");
        FioEngineArgs::of_built(&workspace, "release", engine.clone()).build_in(&workspace)?;
        strip(&engine)?;
        process::output(checkout.command(release.join("rblk-pages")).arg(&build.pages), SHORT)?;
        build.must_be_free_of(&machine_paths(checkout)?)?;
        Ok(build)
    }

    /// Fails if a file names a directory of this machine.
    fn must_be_free_of(&self, paths: &[String]) -> Result<()> {
        let programs = PROGRAMS.map(|name| self.programs.join(name));
        let objects = [self.library.join("lib/librblk.so.1"), self.fio.join("librblk_fio.so")];
        for file in programs.iter().chain(&objects) {
            let bytes = fs::read(file)?;
            for path in paths {
                if bytes.windows(path.len()).any(|window| window == path.as_bytes()) {
                    bail!("{} names {path}, a directory of this machine", file.display());
                }
            }
        }
        Ok(())
    }
}

/// Runs cargo; gives the directory of what it built.
fn cargo(checkout: &Checkout) -> Result<PathBuf> {
    let workspace = checkout.workspace();
    let mut command = workspace.cargo(&["build", "--release", "--locked", "--lib", "--bins"]);
    for name in CRATES {
        command.args(["-p", name]);
    }
    command.args(["--features", "verbs"]);
    let names = [
        ("/usr/src/rblk", &machine_paths(checkout)?[0]),
        ("/usr/src/cargo", &machine_paths(checkout)?[1]),
    ];
    let remap: Vec<String> =
        names.iter().map(|(to, from)| format!("--remap-path-prefix={from}={to}")).collect();
    let c: Vec<String> =
        names.iter().map(|(to, from)| format!("-ffile-prefix-map={from}={to}")).collect();
    command
        .env("CARGO_ENCODED_RUSTFLAGS", remap.join("\u{1f}"))
        .env_remove("RUSTFLAGS")
        .env("CFLAGS", c.join(" "))
        .env("SOURCE_DATE_EPOCH", checkout.time.to_string())
        .env("CARGO_INCREMENTAL", "0")
        // Lines of sources are for a debugger, and the packages are stripped. Without them, the
        // identifier that the linker makes of a program depends on its code alone.
        .env("CARGO_PROFILE_RELEASE_DEBUG", "0");
    eprintln!("dist: building {}", workspace.root.display());
    let (code, said) = process::both(&mut command, LIMIT)?;
    if code != 0 {
        bail!("the build failed:\n{}", process::tail(&String::from_utf8_lossy(&said)));
    }
    Ok(workspace.target.join("release"))
}

/// The directories of this machine that compilers see: of the sources, and of cargo.
fn machine_paths(checkout: &Checkout) -> Result<Vec<String>> {
    let home = match std::env::var_os("CARGO_HOME") {
        Some(home) => PathBuf::from(home),
        None => PathBuf::from(std::env::var_os("HOME").context("HOME is not set")?).join(".cargo"),
    };
    let text = |path: &Path| path.to_str().map(str::to_owned).context("a path that is no text");
    Ok(vec![text(&checkout.root)?, text(&home)?])
}

/// Removes symbols that nobody links against.
fn strip(file: &Path) -> Result<()> {
    let mut command = Command::new("strip");
    command.args(["--strip-unneeded", "--remove-section=.comment"]).arg(file);
    process::output(&mut command, SHORT).map(drop)
}

/// The version of fio, such as 3.33.
fn fio_version() -> Result<String> {
    let said = process::output(Command::new("fio").arg("--version"), SHORT)?;
    let version = said.trim().strip_prefix("fio-").context("fio --version")?;
    Ok(version.to_owned())
}
