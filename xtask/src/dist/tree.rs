//! [`Tree`]: the files of a package, as they will lie below `/`.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, bail};

use super::build::Build;
use super::checkout::Checkout;
use super::remake;
use super::table::{Entry, Layout, Package};
use crate::process;

/// Limit on one small program.
const LIMIT: Duration = Duration::from_secs(60);
/// The maintainers of the packages. dpkg demands an address, and the project reads no mail:
/// `.invalid` is the domain that never has a host (RFC 2606).
pub(crate) const MAINTAINER: &str = "The rblk authors <authors@rblk.invalid>";
/// The number of the packages of one version.
pub(crate) const REVISION: &str = "1";

/// A directory with the files of a package, or of several.
#[derive(Debug)]
pub(crate) struct Tree {
    root: PathBuf,
    files: Vec<PathBuf>,
}

impl Tree {
    /// An empty one.
    pub(crate) fn new(root: PathBuf) -> Result<Self> {
        remake(&root)?;
        Ok(Self { root, files: Vec::new() })
    }

    /// The directory.
    pub(crate) fn root(&self) -> &Path {
        &self.root
    }

    /// The files, relative to the directory, in order.
    pub(crate) fn files(&self) -> Vec<&Path> {
        let mut files: Vec<&Path> = self.files.iter().map(PathBuf::as_path).collect();
        files.sort();
        files.dedup();
        files
    }

    /// The mode of a file.
    pub(crate) fn mode(&self, file: &Path) -> Result<u32> {
        Ok(fs::metadata(self.root.join(file))?.permissions().mode() & 0o777)
    }

    /// Puts the files of a package there. `false`: the package has none, and is not to be made.
    pub(crate) fn fill(
        &mut self,
        package: &Package,
        layout: Layout,
        checkout: &Checkout,
        build: &Build,
    ) -> Result<bool> {
        let mut found = false;
        for entry in &package.files {
            let sources = sources(entry, checkout, build)?;
            if sources.is_empty() && !entry.optional {
                bail!("{}: there is no {}", package.name, entry.from);
            }
            for (source, below) in sources {
                let to = destination(entry, &below, layout, build)?;
                self.put(&source, &to, entry, layout)?;
                found = true;
            }
        }
        if package.needs_files && !found {
            return Ok(false);
        }
        self.papers(package, layout, checkout)?;
        Ok(true)
    }

    /// Copies one file.
    fn put(&mut self, source: &Path, to: &Path, entry: &Entry, layout: Layout) -> Result<()> {
        let executable = fs::metadata(source)?.permissions().mode() & 0o100 != 0;
        let name = to.file_name().unwrap_or_default().to_string_lossy();
        let is_library = name.ends_with(".so") || name.contains(".so.");
        // rpm looks for the libraries that a library needs only if it is executable.
        let executable = executable && (!is_library || layout == Layout::Rpm);
        let mode = if executable { 0o755 } else { 0o644 };
        let mut bytes =
            fs::read(source).with_context(|| format!("cannot read {}", source.display()))?;
        if entry.of_root {
            bytes = of_root(&String::from_utf8(bytes)?).into_bytes();
        }
        if source.extension().is_some_and(|end| end == "pc") {
            let libraries =
                format!("libdir=${{prefix}}/{}", layout.libraries()?.trim_start_matches("usr/"));
            bytes = String::from_utf8(bytes)?.replace("libdir=${prefix}/lib", &libraries).into();
        }
        self.write(to, &bytes, mode, entry.compressed)
    }

    /// Writes one file.
    fn write(&mut self, to: &Path, bytes: &[u8], mode: u32, compressed: bool) -> Result<()> {
        let path = self.root.join(to);
        let parent = path.parent().context("a file without a directory")?;
        fs::create_dir_all(parent)?;
        fs::write(&path, bytes).with_context(|| format!("cannot write {}", path.display()))?;
        fs::set_permissions(&path, fs::Permissions::from_mode(mode))?;
        if !compressed {
            self.files.push(to.to_owned());
            return Ok(());
        }
        // `-n`: neither the name nor the time goes into it.
        process::output(Command::new("gzip").args(["-9n", "-f"]).arg(&path), LIMIT)?;
        self.files.push(PathBuf::from(format!("{}.gz", to.display())));
        Ok(())
    }

    /// The licences, the changes, and the exceptions of lintian.
    fn papers(&mut self, package: &Package, layout: Layout, checkout: &Checkout) -> Result<()> {
        let name = &package.name;
        let doc = Path::new("usr/share/doc").join(name);
        let read = |path: &str| fs::read(checkout.root.join(path)).with_context(|| path.to_owned());
        self.write(&doc.join("changelog"), &read("CHANGELOG.md")?, 0o644, true)?;
        if layout != Layout::Deb {
            let licences = Path::new("usr/share/licenses").join(name);
            for file in ["LICENSE-MIT", "LICENSE-APACHE"] {
                self.write(&licences.join(file), &read(file)?, 0o644, false)?;
            }
            return Ok(());
        }
        self.write(&doc.join("copyright"), &read("packaging/debian/copyright")?, 0o644, false)?;
        let mut date = checkout.command("date");
        date.args(["-u", "-R", "-d"]).arg(format!("@{}", checkout.time));
        let date = process::output(&mut date, LIMIT)?;
        let version = &checkout.version;
        let text = format!(
            "{name} ({version}-{REVISION}) unstable; urgency=medium\n\n  * Version {version}: see \
             changelog.gz.\n\n -- {MAINTAINER}  {}\n",
            date.trim()
        );
        self.write(&doc.join("changelog.Debian"), text.as_bytes(), 0o644, true)?;
        let exceptions = format!("packaging/lint/{name}.lintian-overrides");
        if checkout.root.join(&exceptions).is_file() {
            let to = Path::new("usr/share/lintian/overrides").join(name);
            self.write(&to, &read(&exceptions)?, 0o644, false)?;
        }
        Ok(())
    }
}

/// The files of an entry, each with its path below the directory of the pattern.
fn sources(entry: &Entry, checkout: &Checkout, build: &Build) -> Result<Vec<(PathBuf, PathBuf)>> {
    let places = [
        ("{programs}/", &build.programs),
        ("{library}/", &build.library),
        ("{fio}/", &build.fio),
        ("{pages}/", &build.pages),
    ];
    let place =
        places.iter().find_map(|(word, place)| Some((entry.from.strip_prefix(word)?, *place)));
    let (rest, place) = place.unwrap_or((&entry.from, &checkout.root));
    let path = place.join(rest);
    let name = path.file_name().and_then(|name| name.to_str()).context("a name")?.to_owned();
    let directory = path.parent().context("a directory")?;
    if name == "**" {
        let mut all = Vec::new();
        below(directory, directory, &mut all)?;
        all.sort();
        return Ok(all);
    }
    let Some((head, tail)) = name.split_once('*') else {
        return Ok(path
            .is_file()
            .then(|| (path.clone(), PathBuf::from(name)))
            .into_iter()
            .collect());
    };
    let mut all = Vec::new();
    for found in fs::read_dir(directory).into_iter().flatten() {
        let found = found?.path();
        let name = found.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let fits =
            name.len() >= head.len() + tail.len() && name.starts_with(head) && name.ends_with(tail);
        if fits && found.is_file() {
            all.push((found, PathBuf::from(name)));
        }
    }
    all.sort();
    Ok(all)
}

/// Every file below a directory.
fn below(root: &Path, directory: &Path, all: &mut Vec<(PathBuf, PathBuf)>) -> Result<()> {
    for found in fs::read_dir(directory).into_iter().flatten() {
        let found = found?.path();
        if found.is_dir() {
            below(root, &found, all)?;
        } else {
            all.push((found.clone(), found.strip_prefix(root)?.to_owned()));
        }
    }
    Ok(())
}

/// Where a file of an entry goes.
fn destination(entry: &Entry, below: &Path, layout: Layout, build: &Build) -> Result<PathBuf> {
    let zsh = if layout == Layout::Deb { "vendor-completions" } else { "site-functions" };
    let to = entry.to.replace("{lib}", &layout.libraries()?);
    let to = to.replace("{fio}", &build.fio_version).replace("{zsh}", zsh);
    Ok(match to.strip_suffix('/') {
        Some(directory) => Path::new(directory).join(below),
        None => PathBuf::from(to),
    })
}

/// The comments of a file of tmpfiles.d, and its lines whose owner and group are root.
fn of_root(text: &str) -> String {
    let is_of_root = |line: &&str| {
        let words: Vec<&str> = line.split_whitespace().collect();
        line.starts_with('#') || matches!(words[..], [_, _, _, "root", "root", ..])
    };
    text.lines().filter(is_of_root).map(|line| format!("{line}\n")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn directories_of_another_user_are_left_out() {
        let text =
            "# Words.\nd /run/rblk 0755 root root -\nd /etc/rblk/target.d 2755 root rblk -\n";
        assert_eq!(of_root(text), "# Words.\nd /run/rblk 0755 root root -\n");
    }
}
