//! The undo journal: the steps of this process on this machine, so that another process can undo
//! them after this one died.
//!
//! ```text
//! note(step) -> line in PID.undo, synced -> the action itself
//!            -> drop or undo() -> the action undone -> line "done"
//! ```
//!
//! A process locks the file of its journal for as long as it lives. A process that gets the lock of
//! another journal therefore knows that its owner is dead, and undoes the steps ([`sweep`]), the
//! last one first. Undoing a step twice, or a step that was never done, changes nothing. A step
//! touches only names that were made for it, and has a deadline.

use std::collections::BTreeMap;
use std::fs::{File, OpenOptions, TryLockError};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use rblk_initiator::front::ublk::DeviceToken;
use serde::{Deserialize, Serialize};

use super::ublk_null::UblkNull;
use super::{daemon, nbd, nvme_kernel, trigger, unload};
use crate::child;

/// Where journals are: kernel state and this directory end together, at the next boot.
pub const DIR: &str = "/run/rblk-bench";

const PATIENCE: Duration = Duration::from_secs(15);

#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", tag = "what")]
pub(crate) enum Step {
    Processes {
        tag: String,
    },
    /// Processes of a load: killed, not asked.
    Load {
        tag: String,
    },
    Modules {
        names: Vec<String>,
    },
    Directory {
        name: String,
    },
    DirectoryIn {
        parent: PathBuf,
        name: String,
    },
    NvmetSubsystem {
        nqn: String,
    },
    NvmetPort {
        id: u16,
        nqn: String,
    },
    NvmeHost {
        nqn: String,
    },
    Mount {
        name: String,
        program: PathBuf,
        tag: String,
    },
    Ublk {
        token: String,
    },
    Nbd {
        device: PathBuf,
    },
    SyscallTrigger,
    /// The NBD device that is connected and was not before.
    NbdToCome {
        connected: Vec<PathBuf>,
    },
}

impl Step {
    fn undo(&self, dir: &Path) -> Result<()> {
        match self {
            Self::Processes { tag } => child::end_tagged(tag, PATIENCE),
            Self::Load { tag } => child::end_tagged(tag, Duration::ZERO),
            Self::Modules { names } => unload::unload(names),
            Self::Directory { name } => remove_directory(dir, name),
            Self::DirectoryIn { parent, name } => remove_directory(parent, name),
            Self::NvmetSubsystem { nqn } => nvme_kernel::remove_subsystem(nqn),
            Self::NvmetPort { id, nqn } => nvme_kernel::remove_port(*id, nqn),
            Self::NvmeHost { nqn } => nvme_kernel::disconnect(nqn),
            Self::Mount { name, program, tag } => daemon::unmount(program, name, tag),
            Self::Ublk { token } => match token.parse::<DeviceToken>() {
                Ok(_) if !Path::new("/dev/ublk-control").exists() => Ok(()),
                Ok(token) => UblkNull::remove_left_over(token).map(drop),
                Err(error) => bail!("{token}: {error}"),
            },
            Self::SyscallTrigger => trigger::remove(),
            Self::Nbd { device } => nbd::disconnect(device),
            Self::NbdToCome { connected } => super::connected_nbd()
                .iter()
                .filter(|device| !connected.contains(device))
                .try_for_each(|device| nbd::disconnect(device)),
        }
    }
}

#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
enum Line {
    Begun { id: u64, step: Step },
    Undone(u64),
}

/// The journal of this process. Clones are the same journal.
#[derive(Clone, Debug)]
pub(crate) struct Journal(Arc<Mutex<Inner>>);

#[derive(Debug)]
struct Inner {
    dir: PathBuf,
    path: PathBuf,
    file: File,
    next: u64,
    open: usize,
}

/// One step that was done. Dropped, it is undone; if that fails, it stays in the journal.
#[derive(Debug)]
#[must_use = "dropped, it is undone"]
pub(crate) struct Undo {
    journal: Journal,
    id: u64,
    step: Step,
    pending: bool,
}

impl Journal {
    pub(crate) fn create(dir: &Path) -> Result<Self> {
        make_private(dir)?;
        let pid = std::process::id();
        // Under another name until it is locked: an unlocked journal looks like a dead process's.
        let new = dir.join(format!("{pid}.new"));
        let open = || OpenOptions::new().create(true).append(true).open(&new);
        let file = open().with_context(|| format!("cannot make {}", new.display()))?;
        file.lock().context("cannot lock the journal")?;
        let path = (0..u32::MAX)
            .map(|n| dir.join(format!("{pid}-{n}.undo")))
            .find(|path| !path.exists())
            .context("no name for a journal")?;
        std::fs::rename(&new, &path).with_context(|| format!("cannot make {}", path.display()))?;
        let inner = Inner { dir: dir.to_owned(), path, file, next: 0, open: 0 };
        Ok(Self(Arc::new(Mutex::new(inner))))
    }

    /// Writes a step down before it is done.
    pub(crate) fn note(&self, step: Step) -> Result<Undo> {
        let mut inner = self.inner();
        let id = inner.next;
        inner.write(&Line::Begun { id, step: step.clone() })?;
        inner.next += 1;
        inner.open += 1;
        drop(inner);
        Ok(Undo { journal: self.clone(), id, step, pending: true })
    }

    pub(crate) fn directory(&self, name: &str) -> Result<(PathBuf, Undo)> {
        let undo = self.note(Step::Directory { name: name.to_owned() })?;
        let path = self.inner().dir.join(name);
        std::fs::create_dir(&path).with_context(|| format!("cannot make {}", path.display()))?;
        Ok((path, undo))
    }

    /// Makes a directory in `parent`, an absolute path.
    pub(crate) fn directory_in(&self, parent: &Path, name: &str) -> Result<(PathBuf, Undo)> {
        let (parent, name) = (parent.to_owned(), format!("rblk-bench-{name}"));
        let path = parent.join(&name);
        let undo = self.note(Step::DirectoryIn { parent, name })?;
        std::fs::create_dir(&path).with_context(|| format!("cannot make {}", path.display()))?;
        Ok((path, undo))
    }

    fn inner(&self) -> MutexGuard<'_, Inner> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Inner {
    fn write(&mut self, line: &Line) -> Result<()> {
        let mut text = serde_json::to_vec(line)?;
        text.push(b'\n');
        let written = self.file.write_all(&text).and_then(|()| self.file.sync_data());
        written.with_context(|| format!("cannot write {}", self.path.display()))
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        if self.open == 0 {
            let _ = std::fs::remove_file(&self.path);
        }
    }
}

impl Undo {
    pub(crate) fn undo(mut self) -> Result<()> {
        self.take()
    }

    /// Marks the step as undone, as a part of another step.
    pub(crate) fn forget(mut self) {
        self.pending = false;
        self.done();
    }

    fn take(&mut self) -> Result<()> {
        if std::mem::take(&mut self.pending) {
            let dir = self.journal.inner().dir.clone();
            self.step.undo(&dir)?;
            self.done();
        }
        Ok(())
    }

    fn done(&self) {
        let mut inner = self.journal.inner();
        inner.open -= 1;
        // Undone twice at worst.
        let _ = inner.write(&Line::Undone(self.id));
    }
}

impl Drop for Undo {
    fn drop(&mut self) {
        if let Err(error) = self.take() {
            eprintln!("rblk-bench: {error:#}; `rblk-bench clean-up` tries again");
        }
    }
}

#[derive(Debug, Default)]
pub(crate) struct Swept {
    pub(crate) undone: usize,
    pub(crate) alive: usize,
    pub(crate) failed: Vec<anyhow::Error>,
}

/// Undoes the steps of dead processes, by their journals in `dir`.
pub(crate) fn sweep(dir: &Path) -> Result<Swept> {
    let mut swept = Swept::default();
    for path in journals(dir)? {
        if let Err(error) = sweep_one(dir, &path, &mut swept) {
            swept.failed.push(error.context(path.display().to_string()));
        }
    }
    Ok(swept)
}

/// The steps of dead and living processes, by their journals in `dir`: the last step first.
pub(crate) fn look(dir: &Path) -> Result<Vec<Step>> {
    let mut steps = Vec::new();
    for path in journals(dir)? {
        let text = std::fs::read_to_string(&path);
        let text = text.with_context(|| format!("reading {}", path.display()))?;
        steps.extend(pending(&text).into_iter().map(|(_, step)| step));
    }
    Ok(steps)
}

fn journals(dir: &Path) -> Result<Vec<PathBuf>> {
    let entries = match std::fs::read_dir(dir) {
        Ok(entries) => entries,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(error).with_context(|| format!("reading {}", dir.display())),
    };
    let mut journals: Vec<PathBuf> = entries.flatten().map(|entry| entry.path()).collect();
    journals.retain(|path| path.extension().is_some_and(|extension| extension == "undo"));
    journals.sort();
    Ok(journals)
}

fn sweep_one(dir: &Path, path: &Path, swept: &mut Swept) -> Result<()> {
    let mut file = OpenOptions::new().append(true).open(path)?;
    match file.try_lock() {
        Ok(()) => {}
        Err(TryLockError::WouldBlock) => {
            swept.alive += 1;
            return Ok(());
        }
        Err(TryLockError::Error(error)) => return Err(error.into()),
    }
    let text = std::fs::read_to_string(path)?;
    let mut left = 0;
    for (id, step) in pending(&text) {
        match step.undo(dir) {
            Ok(()) => {
                swept.undone += 1;
                writeln!(file, "{}", serde_json::to_string(&Line::Undone(id))?)?;
            }
            Err(error) => {
                left += 1;
                swept.failed.push(error);
            }
        }
    }
    if left == 0 {
        std::fs::remove_file(path)?;
    }
    Ok(())
}

/// The steps of a journal that are not undone, the last one first. A line that was cut off is a
/// step that was not done.
fn pending(text: &str) -> Vec<(u64, Step)> {
    let mut steps = BTreeMap::new();
    for line in text.lines() {
        match serde_json::from_str(line) {
            Ok(Line::Begun { id, step }) => {
                steps.insert(id, step);
            }
            Ok(Line::Undone(id)) => {
                steps.remove(&id);
            }
            Err(_) => {}
        }
    }
    steps.into_iter().rev().collect()
}

fn make_private(dir: &Path) -> Result<()> {
    use std::os::unix::fs::DirBuilderExt;
    std::fs::DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(dir)
        .with_context(|| format!("cannot make {}", dir.display()))
}

fn remove_directory(dir: &Path, name: &str) -> Result<()> {
    if name.is_empty() || name.starts_with('.') || name.contains('/') {
        bail!("`{name}` is no directory of a run");
    }
    let path = dir.join(name);
    match std::fs::remove_dir_all(&path) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            Err(error).with_context(|| format!("cannot remove {}", path.display()))
        }
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests;
