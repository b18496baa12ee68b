//! `rblk-initiator metrics`: the state of the mounts for node_exporter.

use std::fs::OpenOptions;
use std::io::Write;
use std::path::Path;

use anyhow::Context;
use rblk_config::Exit;
use rblk_operate::Output;
use rblk_operate::mount::mount_status::MountStatus;
use rblk_operate::mount::run_dir::{must_be_readable, names};
use serde::Serialize;

use super::known::{KnownMounts, all_mounts};
use super::mount_metrics::{self, Silence, SilentMount};
use super::silent::Silent;

/// The metrics, in JSON.
#[derive(Serialize)]
struct Exposed<'t> {
    /// The text format of Prometheus.
    exposition: &'t str,
    /// Mounts that do not answer.
    warnings: &'t [&'t str],
}

/// Prints the metrics, or replaces a file with them atomically: its reader sees the old or the new
/// content.
pub(crate) fn metrics(write: Option<&Path>, output: Output) -> anyhow::Result<Exit> {
    must_be_readable()?;
    let names = names();
    let KnownMounts { mounts, silent: told, .. } = all_mounts(&names, false, false)?;
    let lines: Vec<&str> = told.iter().map(Silent::line).collect();
    lines.iter().for_each(|line| output.aside(format_args!("rblk-initiator: {line}")));
    let text = mount_metrics::metrics(&mounts, &silent(&told, &mounts));
    match write {
        None => output.answer(&Exposed { exposition: &text, warnings: &lines }, || text.clone())?,
        Some(path) => {
            replace(path, &text).with_context(|| format!("writing {}", path.display()))?;
        }
    }
    Ok(Exit::Ok)
}

/// The mounts with only their names known. A name without leftovers is no mount.
fn silent(told: &[Silent], mounts: &[MountStatus]) -> Vec<SilentMount> {
    let is_silent = |(name, _): &(&str, &str)| !mounts.iter().any(|mount| mount.name == *name);
    let of = |(name, state): (&str, &str)| SilentMount {
        name: name.to_owned(),
        silence: match state {
            "no answer" => Silence::NoAnswer,
            "bad note" => Silence::BadNote,
            _ => Silence::Dead,
        },
    };
    told.iter().filter_map(Silent::named).filter(is_silent).map(of).collect()
}

/// Replaces a file, readable for all users, as the collector is another user.
fn replace(path: &Path, text: &str) -> std::io::Result<()> {
    use std::os::unix::fs::PermissionsExt;
    // The collector reads only names that end in .prom.
    let mut draft = path.as_os_str().to_owned();
    draft.push(format!(".{}", std::process::id()));
    let draft = Path::new(&draft);
    // An existing file is the draft of a dead process, or a link by the owner of the directory.
    let create = || OpenOptions::new().write(true).create_new(true).open(draft);
    let made = create().or_else(|error| match error.kind() {
        std::io::ErrorKind::AlreadyExists => std::fs::remove_file(draft).and_then(|()| create()),
        _ => Err(error),
    });
    let written = made.and_then(|mut file| {
        file.set_permissions(std::fs::Permissions::from_mode(0o644))?;
        file.write_all(text.as_bytes())
    });
    let replaced = written.and_then(|()| std::fs::rename(draft, path));
    if replaced.is_err() {
        let _ = std::fs::remove_file(draft);
    }
    replaced
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_replaced_and_no_draft_is_left() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("rblk.prom");
        std::fs::write(&path, "old").unwrap();
        replace(&path, "new\n").unwrap();
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "new\n");
        assert!(replace(&dir.path().join("none/rblk.prom"), "x").is_err());
        // A link in place of the draft is not followed.
        let secret = dir.path().join("secret");
        std::fs::write(&secret, "kept").unwrap();
        let draft = dir.path().join(format!("rblk.prom.{}", std::process::id()));
        std::os::unix::fs::symlink(&secret, &draft).unwrap();
        replace(&path, "newer\n").unwrap();
        assert_eq!(std::fs::read_to_string(&secret).unwrap(), "kept");
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "newer\n");
        std::fs::remove_file(&secret).unwrap();
        // A directory stands in place of the file, so the draft cannot replace it.
        let taken = dir.path().join("taken");
        std::fs::create_dir(&taken).unwrap();
        assert!(replace(&taken, "x").is_err());
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 2);
    }
}
