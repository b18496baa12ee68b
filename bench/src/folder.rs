//! [`RunFolder`]: the directory of one run: `run.json`, `report.html`, and `raw/` with the output
//! of fio.

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result, bail};

use crate::result::{Run, SCHEMA};

/// Name of the file that holds the [`Run`].
pub const RUN: &str = "run.json";

const RUN_MAX_BYTES: u64 = 1 << 30;

/// The directory of one run. Several commands may add to a run, one after the other.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct RunFolder {
    path: PathBuf,
}

impl RunFolder {
    /// Makes the directory, with `raw/` in it, or opens one that is there.
    pub fn open(path: &Path) -> Result<Self> {
        let path =
            std::path::absolute(path).with_context(|| format!("{} is no path", path.display()))?;
        let raw = path.join("raw");
        fs::create_dir_all(&raw).with_context(|| format!("cannot make {}", raw.display()))?;
        Ok(Self { path })
    }

    /// The path of the directory.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The name of the directory, which names the run.
    pub fn name(&self) -> String {
        self.path.file_name().map_or_else(String::new, |name| name.to_string_lossy().into_owned())
    }

    /// The path of a raw file, and its name relative to the folder.
    pub fn raw(&self, name: &str) -> (PathBuf, String) {
        let relative = format!("raw/{name}");
        (self.path.join(&relative), relative)
    }

    /// The run so far, if there is one.
    pub fn load(&self) -> Result<Option<Run>> {
        read(&self.path.join(RUN))
    }

    /// Keeps the run: at any moment either this state or the one before is on disk.
    pub fn save(&self, run: &Run) -> Result<()> {
        self.write(RUN, serde_json::to_string(run)?.as_bytes())
    }

    /// Writes a file of the folder, whole or not at all.
    pub fn write(&self, name: &str, bytes: &[u8]) -> Result<()> {
        let to = self.path.join(name);
        let half = self.path.join(format!(".{name}.part"));
        let write = || {
            let mut file = fs::File::create(&half)?;
            file.write_all(bytes)?;
            file.sync_all()?;
            fs::rename(&half, &to)
        };
        write().with_context(|| format!("cannot write {}", to.display()))
    }
}

/// A name for the folder of a run that begins now: `rblk-bench-20261121-115900`, in UTC.
pub fn name_for_now() -> String {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
    let text = utc(now).replace(['-', ':'], "").replace(' ', "-");
    format!("rblk-bench-{text}")
}

/// A second of the Unix clock as `2026-11-21 11:59:00`, in UTC.
pub fn utc(unix: u64) -> String {
    let (days, second) = (unix / 86_400, unix % 86_400);
    // Days since 0000-03-01, so that the leap day is the last of its year (Howard Hinnant's
    // algorithm).
    let days = days + 719_468;
    let (era, day) = (days / 146_097, days % 146_097);
    let year = (day - day / 1460 + day / 36_524 - day / 146_096) / 365;
    let day = day - (365 * year + year / 4 - year / 100);
    let month = (5 * day + 2) / 153;
    let day = day - (153 * month + 2) / 5 + 1;
    let (month, next) = if month < 10 { (month + 3, 0) } else { (month - 9, 1) };
    let year = era * 400 + year + next;
    let (hour, minute, second) = (second / 3600, second / 60 % 60, second % 60);
    format!("{year:04}-{month:02}-{day:02} {hour:02}:{minute:02}:{second:02}")
}

/// Reads a run from its file; `None` if there is none.
pub fn read(file: &Path) -> Result<Option<Run>> {
    let name = file.display();
    match fs::metadata(file) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(error).with_context(|| format!("cannot read {name}")),
        Ok(meta) if meta.len() > RUN_MAX_BYTES => bail!("{name} is too long to be a run"),
        Ok(_) => {}
    }
    let text = fs::read_to_string(file).with_context(|| format!("cannot read {name}"))?;
    let run: Run = serde_json::from_str(&text).with_context(|| format!("{name} is no run"))?;
    if run.schema > SCHEMA {
        bail!(
            "{name} has schema {}, and this rblk-bench knows {SCHEMA}: take a newer one",
            run.schema
        );
    }
    Ok(Some(run))
}

#[cfg(test)]
mod tests;
