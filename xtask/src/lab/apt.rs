//! Packages of other Debian suites, without touching this machine's own apt configuration.
//!
//! [`Apt`] is a private apt root: sources, lists and archives of its own, the mirror and keyring
//! of the machine's own Debian source. The packages are verified as always (a signed Release file,
//! then hashes), and only downloaded, never installed.

use std::collections::HashMap;
use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};

use super::cache::Cache;
use super::step::step;

/// The keyring that Debian's own sources are signed by, for a source that names none.
const DEFAULT_KEYRING: &str = "/usr/share/keyrings/debian-archive-keyring.gpg";

/// One archive that this machine's apt is configured for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Source {
    /// Address of the archive.
    pub(crate) uri: String,
    /// Its suites, such as `bookworm`.
    pub(crate) suites: Vec<String>,
    /// Path of the keyring, when the source names one.
    pub(crate) signed_by: Option<String>,
}

/// Parses the deb822 format (`*.sources`): stanzas of `Key: value`, values continued by
/// indentation.
pub(crate) fn parse_deb822(text: &str) -> Vec<Source> {
    let mut sources = Vec::new();
    let mut stanza: HashMap<String, String> = HashMap::new();
    let mut last = String::new();
    for line in text.lines().chain([""]) {
        if line.starts_with('#') {
            continue;
        }
        if line.trim().is_empty() {
            sources.extend(from_stanza(&std::mem::take(&mut stanza)));
        } else if line.starts_with([' ', '\t']) {
            if let Some(value) = stanza.get_mut(&last) {
                value.push('\n');
                value.push_str(line.trim());
            }
        } else if let Some((key, value)) = line.split_once(':') {
            last = key.to_ascii_lowercase();
            stanza.insert(last.clone(), value.trim().to_owned());
        }
    }
    sources
}

fn from_stanza(stanza: &HashMap<String, String>) -> Vec<Source> {
    let words = |key: &str| -> Vec<String> {
        stanza
            .get(key)
            .map(|value| value.split_whitespace().map(str::to_owned).collect())
            .unwrap_or_default()
    };
    let off =
        stanza.get("enabled").is_some_and(|value| matches!(value.as_str(), "no" | "false" | "0"));
    if off || !words("types").iter().any(|kind| kind == "deb") {
        return Vec::new();
    }
    // A key can stand in the file itself; only a path can be handed on.
    let signed_by = stanza.get("signed-by").filter(|value| value.starts_with('/')).cloned();
    words("uris")
        .into_iter()
        .map(|uri| Source { uri, suites: words("suites"), signed_by: signed_by.clone() })
        .collect()
}

/// Parses the one-line format (`*.list`): `deb [signed-by=...] URI SUITE COMPONENT...`.
pub(crate) fn parse_one_line(text: &str) -> Vec<Source> {
    text.lines().filter_map(parse_line).collect()
}

fn parse_line(line: &str) -> Option<Source> {
    let line = line.split('#').next()?.trim();
    let mut rest = line.strip_prefix("deb")?.strip_prefix([' ', '\t'])?.trim_start();
    let mut signed_by = None;
    if let Some(options) = rest.strip_prefix('[') {
        let (options, after) = options.split_once(']')?;
        signed_by = options
            .split_whitespace()
            .find_map(|option| option.strip_prefix("signed-by="))
            .map(str::to_owned);
        rest = after;
    }
    let mut words = rest.split_whitespace();
    let uri = words.next()?.to_owned();
    let suite = words.next()?.to_owned();
    Some(Source { uri, suites: vec![suite], signed_by })
}

/// The source of the Debian archive proper: not its security archive, not another vendor's.
///
/// It is told by its suites, as `bookworm-updates` exists nowhere else; and by its path, for a
/// machine that has only the plain suite configured.
pub(crate) fn debian_archive(sources: &[Source]) -> Option<&Source> {
    let has_updates =
        |source: &&Source| source.suites.iter().any(|suite| suite.ends_with("-updates"));
    let is_debian = |source: &&Source| {
        let path = source.uri.trim_end_matches('/');
        path.ends_with("/debian") && !source.suites.iter().any(|suite| suite.ends_with("-security"))
    };
    sources.iter().filter(has_updates).find(is_debian).or_else(|| sources.iter().find(is_debian))
}

/// The Debian archive that this machine's apt is configured for.
fn own_archive() -> Result<Source> {
    let sources = read_sources(Path::new("/etc/apt"))?;
    debian_archive(&sources).cloned().context(
        "no Debian archive is configured in /etc/apt/sources.list or /etc/apt/sources.list.d; \
         the lab takes packages from that archive's mirror: add it",
    )
}

/// The archive of upstream's source among the files of a source package.
fn upstream_archive(dir: &Path) -> Result<PathBuf> {
    let is_archive = |path: &PathBuf| {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        name.contains(".orig.tar.") && !name.ends_with(".asc")
    };
    let mut files = fs::read_dir(dir)?.flatten().map(|entry| entry.path());
    files.find(is_archive).context("the source package has no .orig.tar archive")
}

/// Reads the sources that this machine's apt is configured for.
fn read_sources(etc: &Path) -> Result<Vec<Source>> {
    let mut files = vec![etc.join("sources.list")];
    if let Ok(parts) = fs::read_dir(etc.join("sources.list.d")) {
        files.extend(parts.flatten().map(|entry| entry.path()));
    }
    files.sort();
    let mut sources = Vec::new();
    for file in files.iter().filter(|file| file.is_file()) {
        let parse = match file.extension().and_then(OsStr::to_str) {
            Some("list") => parse_one_line,
            Some("sources") => parse_deb822,
            _ => continue,
        };
        let text =
            fs::read_to_string(file).with_context(|| format!("cannot read {}", file.display()))?;
        sources.extend(parse(&text));
    }
    Ok(sources)
}

/// A package as the archive offers it.
#[derive(Debug)]
struct Offer {
    file: String,
    bytes: u64,
}

/// A private apt root for some suites of the machine's own mirror.
#[derive(Debug)]
pub(crate) struct Apt {
    root: PathBuf,
}

impl Apt {
    /// Sets the root up in the cache and fetches the suites' indexes. The cache's lock is held.
    pub(crate) fn update(cache: &Cache, suites: &[&str]) -> Result<Self> {
        let source = own_archive()?;
        Self::set_up(cache, "apt", "deb", &source, &suites.join(" "))
    }

    /// The same for the sources of the suites that this machine's own packages come from.
    pub(crate) fn update_sources(cache: &Cache) -> Result<Self> {
        let source = own_archive()?;
        Self::set_up(cache, "apt-src", "deb-src", &source, &source.suites.join(" "))
    }

    fn set_up(
        cache: &Cache,
        name: &str,
        kind: &str,
        source: &Source,
        suites: &str,
    ) -> Result<Self> {
        let keyring = source.signed_by.as_deref().unwrap_or(DEFAULT_KEYRING);
        if !Path::new(keyring).is_file() {
            bail!("the keyring {keyring} is missing; install debian-archive-keyring");
        }
        let root = cache.path(name);
        for dir in ["state/lists/partial", "cache/archives/partial"] {
            fs::create_dir_all(root.join(dir))?;
        }
        let stanza = format!(
            "Types: {kind}\nURIs: {}\nSuites: {suites}\nComponents: main\nArchitectures: amd64\nSigned-By: {keyring}\n",
            source.uri
        );
        cache.write(&root.join("lab.sources"), stanza.as_bytes())?;
        let apt = Apt { root };
        step(&format!("reading the package lists of {suites}"), || {
            apt.output("apt-get", &["update", "-q", "--error-on=any"]).map(drop)
        })?;
        Ok(apt)
    }

    /// Downloads and verifies a source package into `dir`; gives the archive of upstream's source.
    pub(crate) fn source(&self, package: &str, version: &str, dir: &Path) -> Result<PathBuf> {
        step(&format!("fetching the source of {package} {version}"), || {
            let mut command = self.command("apt-get");
            command.args(["source", "-q", "--download-only"]).arg(format!("{package}={version}"));
            run(command.current_dir(dir)).map(drop)
        })?;
        upstream_archive(dir)
    }

    /// The names of all packages that begin with `prefix`.
    pub(crate) fn names(&self, prefix: &str) -> Result<Vec<String>> {
        let names = self.output("apt-cache", &["pkgnames", prefix])?;
        Ok(names.lines().map(str::to_owned).collect())
    }

    /// Downloads and verifies packages into `dir`; gives their files.
    pub(crate) fn download(&self, packages: &[String], dir: &Path) -> Result<Vec<PathBuf>> {
        let mut files = Vec::new();
        for package in packages {
            let offer = self.offer(package)?;
            let megabytes = offer.bytes.div_ceil(1_000_000);
            step(&format!("fetching {package} ({megabytes} MB)"), || {
                run(self.command("apt-get").args(["download", "-q", package]).current_dir(dir))
                    .map(drop)
            })?;
            files.push(dir.join(offer.file));
        }
        Ok(files)
    }

    fn offer(&self, package: &str) -> Result<Offer> {
        let text = self.output("apt-get", &["download", "--print-uris", package])?;
        parse_print_uris(&text)
            .with_context(|| format!("apt-get offers no file for {package}: {text:?}"))
    }

    fn output(&self, program: &str, args: &[&str]) -> Result<String> {
        run(self.command(program).args(args))
    }

    /// An apt program whose every path lies in the private root; proxies and the like stay the
    /// machine's.
    fn command(&self, program: &str) -> Command {
        let mut command = Command::new(program);
        let root = self.root.display();
        for option in [
            format!("Dir::Etc::sourcelist={root}/lab.sources"),
            "Dir::Etc::sourceparts=/dev/null".into(),
            "Dir::Etc::preferencesparts=/dev/null".into(),
            format!("Dir::State={root}/state"),
            "Dir::State::status=/dev/null".into(),
            format!("Dir::Cache={root}/cache"),
            // The cache may lie where apt's own user cannot write, and then apt only warns.
            "APT::Sandbox::User=root".into(),
            "Acquire::AllowInsecureRepositories=false".into(),
            "APT::Get::AllowUnauthenticated=false".into(),
            "Acquire::Retries=3".into(),
        ] {
            command.args(["-o", &option]);
        }
        command
    }
}

/// Parses `'URI' FILE SIZE HASH`.
fn parse_print_uris(text: &str) -> Option<Offer> {
    let line = text.lines().find(|line| line.starts_with('\''))?;
    let mut words = line.split_whitespace().skip(1);
    Some(Offer { file: words.next()?.to_owned(), bytes: words.next()?.parse().ok()? })
}

/// Runs a program to its end and gives its stdout; a failure shows what it said.
pub(crate) fn run(command: &mut Command) -> Result<String> {
    let name = command.get_program().to_string_lossy().into_owned();
    let output = command
        .env("LC_ALL", "C")
        .stdin(Stdio::null())
        .output()
        .with_context(|| format!("cannot run {name}; is it installed, and in PATH?"))?;
    let stdout = String::from_utf8_lossy(&output.stdout).into_owned();
    if !output.status.success() {
        let stderr = String::from_utf8_lossy(&output.stderr);
        bail!("{name} failed ({}):\n{}{}", output.status, stdout.trim_end(), stderr.trim_end());
    }
    Ok(stdout)
}

#[cfg(test)]
mod tests {
    use super::*;

    const DEB822: &str = "\
# A comment.
Types: deb deb-src
# http://old.example/debian
URIs: http://mirror.example/debian
Suites: bookworm
 bookworm-updates
Components: main
Signed-By: /usr/share/keyrings/k.gpg

Types: deb
URIs: http://mirror.example/debian-security
Suites: bookworm-security

Enabled: no
Types: deb
URIs: http://off.example/debian
Suites: bookworm

Types: deb-src
URIs: http://src.example/debian
Suites: bookworm
";

    #[test]
    fn deb822_stanzas_are_read() {
        let sources = parse_deb822(DEB822);
        assert_eq!(sources.len(), 2);
        assert_eq!(sources[0].uri, "http://mirror.example/debian");
        assert_eq!(sources[0].suites, ["bookworm", "bookworm-updates"]);
        assert_eq!(sources[0].signed_by.as_deref(), Some("/usr/share/keyrings/k.gpg"));
    }

    #[test]
    fn an_embedded_key_is_no_path() {
        let text = "Types: deb\nURIs: u/debian\nSuites: s\nSigned-By:\n -----BEGIN PGP PUBLIC KEY BLOCK-----\n .\n";
        assert_eq!(parse_deb822(text)[0].signed_by, None);
    }

    #[test]
    fn one_line_entries_are_read() {
        let text = "\
# deb http://off.example/debian bookworm main
deb [arch=amd64 signed-by=/k.gpg] http://mirror.example/debian bookworm main contrib # why
deb-src http://mirror.example/debian bookworm main
deb\thttp://mirror.example/debian\tbookworm-updates\tmain
";
        let sources = parse_one_line(text);
        assert_eq!(sources.len(), 2);
        assert_eq!(sources[0].signed_by.as_deref(), Some("/k.gpg"));
        assert_eq!(sources[1].suites, ["bookworm-updates"]);
    }

    #[test]
    fn the_archive_proper_is_chosen() {
        let mut sources = parse_one_line("deb http://vendor.example/debian stable main\n");
        sources.extend(parse_deb822(DEB822));
        assert_eq!(debian_archive(&sources).unwrap().uri, "http://mirror.example/debian");
        let plain = parse_one_line(
            "deb http://a.example/apt x main\ndeb http://b.example/debian/ bookworm main\n",
        );
        assert_eq!(debian_archive(&plain).unwrap().uri, "http://b.example/debian/");
        assert!(debian_archive(&plain[..1]).is_none());
    }

    #[test]
    fn the_archive_of_a_source_is_found_beside_its_signature() {
        let dir = tempfile::tempdir().unwrap();
        for name in ["x_3.dsc", "x_3.orig.tar.gz.asc", "x_3-1.debian.tar.xz"] {
            fs::write(dir.path().join(name), "").unwrap();
        }
        assert!(upstream_archive(dir.path()).is_err());
        let archive = dir.path().join("x_3.orig.tar.gz");
        fs::write(&archive, "").unwrap();
        assert_eq!(upstream_archive(dir.path()).unwrap(), archive);
    }

    #[test]
    fn an_offer_is_read() {
        let offer = parse_print_uris(
            "'http://m/p/x_1%3a2_amd64.deb' x_1%3a2_amd64.deb 159105900 SHA256:ab\n",
        )
        .unwrap();
        assert_eq!((offer.file.as_str(), offer.bytes), ("x_1%3a2_amd64.deb", 159_105_900));
    }
}
