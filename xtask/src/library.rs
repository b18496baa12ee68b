//! `cargo xtask library`: librblk for programs in C.
//!
//! Cargo builds the archive, and the C compiler links the shared library from it: rustc would give
//! its symbols no versions.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use clap::Args;

use crate::artifacts::BUILD_LIMIT;
use crate::process;
use crate::workspace::Workspace;

/// The name by which programs find the shared library. The number changes with the ABI.
const SONAME: &str = "librblk.so.1";
/// The archive of cargo, for static linking.
pub(crate) const ARCHIVE: &str = "librblk.a";
/// Limit on one run of the C compiler.
const LINK_LIMIT: Duration = Duration::from_secs(10 * 60);
/// What the archive needs of the system.
const SYSTEM: [&str; 5] = ["-lgcc_s", "-lpthread", "-lm", "-ldl", "-lc"];
/// The same, with RDMA.
const RDMA: [&str; 2] = ["-lrdmacm", "-libverbs"];

/// Build librblk, by which programs in C use volumes without a block device
///
/// Leaves include/rblk.h, the shared library and the archive in lib/, and lib/pkgconfig/rblk.pc in
/// DIR. docs/library.md explains the use.
///
/// Exit status: 0, or 1 when something failed.
#[derive(Debug, Args)]
#[command(verbatim_doc_comment)]
pub(crate) struct LibraryArgs {
    /// Where the files are put
    #[arg(long, value_name = "DIR")]
    out: PathBuf,

    /// Path of that directory on the machine that uses it, as rblk.pc names it [default: DIR]
    #[arg(long, value_name = "PATH")]
    prefix: Option<PathBuf>,

    #[command(flatten)]
    build: Build,
}

/// How librblk is built.
#[derive(Debug, Clone, Args)]
pub(crate) struct Build {
    /// Profile of cargo
    #[arg(long, default_value = "release", value_name = "NAME")]
    profile: String,

    /// Leave RDMA out: the library speaks tcp:// only and needs no libibverbs
    #[arg(long)]
    no_verbs: bool,
}

impl Build {
    /// With a profile of cargo, and RDMA.
    pub(crate) fn with(profile: &str) -> Self {
        Self { profile: profile.to_owned(), no_verbs: false }
    }

    /// Builds the archive; gives its path. In a directory of programs that are used as they are the
    /// archive is used as it is, too.
    pub(crate) fn archive(&self, workspace: &Workspace) -> Result<PathBuf> {
        if let Some(directory) = std::env::var_os("RBLK_BIN_DIR") {
            let built = Path::new(&directory).join(ARCHIVE);
            if built.exists() {
                return Ok(built);
            }
        }
        let mut command = workspace.cargo(&["build", "-p", "rblk-capi", "--profile"]);
        command.arg(&self.profile).arg("--target-dir").arg(&workspace.target);
        if !self.no_verbs {
            command.args(["--features", "verbs"]);
        }
        process::output(&mut command, BUILD_LIMIT)?;
        Ok(self.archive_path(workspace))
    }

    /// Where the archive is once it is built.
    pub(crate) fn archive_path(&self, workspace: &Workspace) -> PathBuf {
        let directory = if self.profile == "dev" { "debug" } else { self.profile.as_str() };
        workspace.target.join(directory).join(ARCHIVE)
    }

    /// What the linker needs besides the archive.
    pub(crate) fn libraries(&self) -> Vec<&'static str> {
        let rdma: &[&str] = if self.no_verbs { &[] } else { &RDMA };
        [rdma, &SYSTEM].concat()
    }
}

impl LibraryArgs {
    /// In a directory, for programs on a machine where the directory is at `prefix`.
    pub(crate) fn of_built(out: PathBuf, prefix: &str) -> Self {
        Self { out, prefix: Some(PathBuf::from(prefix)), build: Build::with("release") }
    }

    /// Builds it.
    pub(crate) fn run(&self) -> Result<i32> {
        let workspace = Workspace::find()?;
        let archive = self.build.archive(&workspace)?;
        println!("{}", self.build_in(&workspace, &archive)?.display());
        Ok(0)
    }

    /// Builds it of an archive that cargo built in a workspace; gives its directory.
    pub(crate) fn build_in(&self, workspace: &Workspace, archive: &Path) -> Result<PathBuf> {
        let source = directory(workspace);
        for part in ["include", "lib/pkgconfig"] {
            let path = self.out.join(part);
            fs::create_dir_all(&path).with_context(|| format!("cannot make {}", path.display()))?;
        }
        let out = self.out.canonicalize()?;
        let lib = out.join("lib");
        copy(&source.join("include/rblk.h"), &out.join("include/rblk.h"))?;
        copy(archive, &lib.join("librblk.a"))?;
        let mut command = link(&lib.join(SONAME), &source.join("rblk.map"));
        command.arg(format!("-Wl,-soname,{SONAME}")).arg("-Wl,--whole-archive").arg(archive);
        command.arg("-Wl,--no-whole-archive").args(self.build.libraries());
        run(&mut command)?;
        let name = lib.join("librblk.so");
        let _ = fs::remove_file(&name);
        std::os::unix::fs::symlink(SONAME, &name)
            .with_context(|| format!("cannot make {}", name.display()))?;
        let prefix = self.prefix.as_deref().unwrap_or(&out);
        let template = fs::read_to_string(source.join("rblk.pc.in")).context("rblk.pc.in")?;
        let text = pkg_config(&template, prefix, &self.build.libraries());
        fs::write(lib.join("pkgconfig/rblk.pc"), text).context("cannot write rblk.pc")?;
        Ok(out)
    }
}

/// Where the sources of librblk are.
pub(crate) fn directory(workspace: &Workspace) -> PathBuf {
    workspace.root.join("initiator/capi")
}

/// The C compiler, to link a shared object whose symbols are those of a version script.
///
/// The object is never unloaded: threads of it run while a volume is open, and values of threads
/// that end later have destructors in it.
pub(crate) fn link(out: &Path, symbols: &Path) -> Command {
    let mut command = Command::new("cc");
    command.args(["-shared", "-Wl,-z,nodelete", "-Wl,-z,relro", "-Wl,-z,now", "-Wl,--gc-sections"]);
    command.arg(format!("-Wl,--version-script={}", symbols.display()));
    command.arg("-o").arg(out);
    command
}

/// Runs the C compiler.
pub(crate) fn run(command: &mut Command) -> Result<()> {
    let said = process::output(command.env("LC_ALL", "C"), LINK_LIMIT).context(
        "the C compiler failed; packages it needs: gcc, libc6-dev, libibverbs-dev, librdmacm-dev",
    )?;
    if !said.is_empty() {
        bail!("{}: {said}", process::words(command));
    }
    Ok(())
}

fn copy(from: &Path, to: &Path) -> Result<()> {
    fs::copy(from, to)
        .map(drop)
        .with_context(|| format!("cannot copy {} to {}", from.display(), to.display()))
}

/// The text of rblk.pc.
fn pkg_config(template: &str, prefix: &Path, libraries: &[&str]) -> String {
    template
        .replace("@PREFIX@", &prefix.display().to_string())
        .replace("@VERSION@", env!("CARGO_PKG_VERSION"))
        .replace("@PRIVATE@", &libraries.join(" "))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_file_for_pkg_config_names_what_an_archive_needs() {
        let template = include_str!("../../initiator/capi/rblk.pc.in");
        let build = |no_verbs| Build { profile: "release".to_owned(), no_verbs };
        let text = pkg_config(template, Path::new("/usr"), &build(false).libraries());
        assert!(text.starts_with("prefix=/usr\n") && !text.contains('@'), "{text}");
        assert!(text.contains("Libs.private: -lrdmacm -libverbs"), "{text}");
        assert!(!build(true).libraries().contains(&"-libverbs"));
    }
}
