//! `rblk-target volume`: the volumes of the running target. The target changes first, since it
//! knows their users; the file of the configuration follows with --persist. Before both, the
//! configuration with the change is checked.

use std::path::Path;
use std::time::SystemTime;

use anyhow::Context;
use rblk_config::{
    ByteRate, ByteSize, Exit, TargetConfig, VolumeConfig, VolumeFile, named_in_rights,
};
use rblk_operate::Output;
use rblk_operate::target::ask::{Ask, Response, VolumeEdit, VolumeReport};
use rblk_operate::target::flags::{
    ChangeArgs, RunningArgs, VolumeAddArgs, VolumeCommand, VolumeMoveArgs, VolumeRemoveArgs,
    VolumeResizeArgs, VolumeSetArgs, VolumeSnapshotArgs,
};
use rblk_operate::target::refusal::Refusal;
use rblk_operate::target::status::{TargetStatus, VolumeStatus};

use crate::target::running::{asked, not_understood, socket_of, status_of};

/// Carries out a command.
pub(crate) fn volume(command: &VolumeCommand, output: Output) -> anyhow::Result<Exit> {
    match command {
        VolumeCommand::Add(args) => add(args, output),
        VolumeCommand::Remove(args) => remove(args, output),
        VolumeCommand::Resize(args) => resize(args, output),
        VolumeCommand::Set(args) => set(args, output),
        VolumeCommand::Snapshot(args) => snapshot(args, output),
        VolumeCommand::Move(args) => hand_over(args, output),
        VolumeCommand::List(running) => list(running, output),
    }
}

fn hand_over(args: &VolumeMoveArgs, output: Output) -> anyhow::Result<Exit> {
    let VolumeMoveArgs { name, to, running } = args;
    let ask = match to.clone() {
        Some(to) => Ask::MoveVolumeTo { name: name.clone(), to },
        None => Ask::MoveVolume { name: name.clone() },
    };
    let Response::Done = asked(&socket_of(running)?, ask)? else {
        return Err(not_understood());
    };
    let told = || match to {
        Some(to) => format!("{name} is served by member {to}\n"),
        None => format!("{name} is handed over: its host goes to another member\n"),
    };
    output.answer(&serde_json::json!({ "name": name, "moved": true, "to": to }), told)?;
    Ok(Exit::Ok)
}

fn add(args: &VolumeAddArgs, output: Output) -> anyhow::Result<Exit> {
    let name = args.name.clone();
    let volume = match (&args.file, &args.rbd, args.memory, args.null) {
        (Some(path), ..) => VolumeConfig::file(name, std::path::absolute(path)?),
        (_, Some(image), ..) => VolumeConfig::rbd(name, image),
        (.., Some(size), _) => VolumeConfig::memory(name, size),
        (.., size) => VolumeConfig::null(name, size.unwrap_or(ByteSize(0))),
    };
    let volume = args.keys.over(&volume)?;
    let file = file_of(&args.place, &args.name)?;
    if let Some(file) = &file {
        file.check(&volume)?;
    }
    let ask = Ask::AddVolume { volume: Box::new(volume) };
    order(&args.place, file.into(), ask, VolumeDeed::Served, output)
}

fn remove(args: &VolumeRemoveArgs, output: Output) -> anyhow::Result<Exit> {
    let file = file_of(&args.place, &args.name)?;
    if file.is_some() {
        let hosts = TargetConfig::load(&args.place.running.config)?.hosts;
        if let Some(rights) = named_in_rights(&hosts, &args.name) {
            return Err(Refusal::senseless(rights).into());
        }
    }
    if let Some(file) = &file
        && file.check_without()?.volumes.iter().any(|volume| volume.name == args.name)
    {
        return Err(elsewhere(&args.name, file.path(), "remove it there").into());
    }
    let VolumeRemoveArgs { name, force, drain, .. } = args;
    let ask = Ask::RemoveVolume { name: name.clone(), force: *force, drain: *drain };
    let file = match file {
        // Other commands may write their files for as long as hosts use the volume.
        Some(file) if *drain => {
            drop(file);
            Written::Later
        }
        file => file.into(),
    };
    order(&args.place, file, ask, VolumeDeed::Removed, output)
}

fn resize(args: &VolumeResizeArgs, output: Output) -> anyhow::Result<Exit> {
    if !args.place.persist {
        must_not_be_fixed(&args.place.running.config, &args.name)?;
    }
    let file = match args.place.persist && keeps_its_size(&args.place.running.config, &args.name)? {
        true => None,
        false => changed_file(&args.place, &args.name)?,
    };
    let VolumeResizeArgs { name, size, shrink, .. } = args;
    let ask = Ask::ResizeVolume { name: name.clone(), size: *size, shrink: *shrink };
    order(&args.place, file.into(), ask, VolumeDeed::Resized, output)
}

/// Whether the file or device gives the size, since no file of the configuration does.
fn keeps_its_size(config: &Path, name: &str) -> anyhow::Result<bool> {
    let config = TargetConfig::load(config)?;
    let volume = config.volumes.iter().find(|volume| volume.name == name);
    Ok(volume.is_some_and(|volume| volume.path.is_some() && volume.size.is_none()))
}

/// Refuses a volume with a size in the configuration that would not change with its file: the
/// target would not start again.
fn must_not_be_fixed(config: &Path, name: &str) -> anyhow::Result<()> {
    if !config.exists() {
        return Ok(());
    }
    let config = TargetConfig::load(config)?;
    let volume = config.volumes.iter().find(|volume| volume.name == name);
    match volume.filter(|volume| volume.path.is_some()).and_then(|volume| volume.size) {
        None => Ok(()),
        Some(size) => Err(Refusal::senseless(format!(
            "the configuration says that the file of {name} has {size}, and the target does not start with a file \
             of another size: change it with --persist, or change it there and run `rblk-target reload`"
        ))
        .into()),
    }
}

fn set(args: &VolumeSetArgs, output: Output) -> anyhow::Result<Exit> {
    let file = changed_file(&args.place, &args.name)?;
    let VolumeSetArgs { name, keys, .. } = args;
    let new = keys.over(&VolumeConfig::default())?;
    let edit = VolumeEdit {
        read_only: keys.has("read_only").then_some(new.read_only),
        cache: new.cache,
        read_ahead: keys.has("read_ahead").then_some(new.read_ahead),
        cache_min: keys.wish("cache_min", new.cache_min),
        cache_max: keys.wish("cache_max", new.cache_max),
        limits: keys.limits(new.limits),
    };
    let ask = Ask::SetVolume { name: name.clone(), edit };
    order(&args.place, file.into(), ask, VolumeDeed::Changed, output)
}

fn snapshot(args: &VolumeSnapshotArgs, output: Output) -> anyhow::Result<Exit> {
    let new_name = args.new_name.clone().unwrap_or_else(|| name_at(&args.name, SystemTime::now()));
    let path = args.path.as_ref().map(std::path::absolute).transpose()?;
    let file = file_of(&args.place, &new_name)?;
    if let Some(file) = &file
        && (file.read()?.is_some()
            || file.check_without()?.volumes.iter().any(|volume| volume.name == new_name))
    {
        let text = format!(
            "the configuration already has a volume {new_name}: choose another name with --as"
        );
        return Err(Refusal::new(Exit::AlreadyThere, text).into());
    }
    let ask = Ask::SnapshotVolume { name: args.name.clone(), new_name, path };
    order(&args.place, file.into(), ask, VolumeDeed::Snapshot, output)
}

/// The name of a snapshot without one.
fn name_at(name: &str, now: SystemTime) -> String {
    let time = humantime::format_rfc3339_seconds(now).to_string();
    let digits = |part: &str| part.chars().filter(char::is_ascii_digit).collect::<String>();
    let (day, time) = time.split_once('T').unwrap_or((&time, ""));
    format!("{name}-{}-{}", digits(day), digits(time))
}

/// The file that a change is written to, with --persist.
fn file_of(place: &ChangeArgs, name: &str) -> anyhow::Result<Option<VolumeFile>> {
    match place.persist {
        true => Ok(Some(VolumeFile::lock(&place.running.config, name)?)),
        false => Ok(None),
    }
}

/// The file of an existing volume, with --persist. Refuses a volume that stands in another file,
/// which people write.
fn changed_file(place: &ChangeArgs, name: &str) -> anyhow::Result<Option<VolumeFile>> {
    let file = file_of(place, name)?;
    if let Some(file) = &file
        && file.read()?.is_none()
        && TargetConfig::load(&place.running.config)?.volumes.iter().any(|v| v.name == name)
    {
        return Err(elsewhere(name, file.path(), "change it there").into());
    }
    Ok(file)
}

fn elsewhere(name: &str, file: &Path, what: &str) -> Refusal {
    Refusal::senseless(format!(
        "{name} is not in {}: another file of the configuration has it. Either {what} and run `rblk-target reload`, \
         or omit --persist",
        file.display()
    ))
}

/// The file that a change is written to.
enum Written {
    No,
    /// Locked since before the change, so that files and changes have one order.
    To(VolumeFile),
    /// To be locked when the volume is gone.
    Later,
}

impl From<Option<VolumeFile>> for Written {
    fn from(file: Option<VolumeFile>) -> Self {
        file.map_or(Self::No, Self::To)
    }
}

/// The kind of a change of a volume.
#[derive(Clone, Copy, PartialEq, Eq)]
enum VolumeDeed {
    Served,
    Removed,
    Resized,
    Changed,
    Snapshot,
}

impl VolumeDeed {
    fn word(self) -> &'static str {
        match self {
            Self::Served => "served",
            Self::Removed => "removed",
            Self::Resized | Self::Changed => "changed",
            Self::Snapshot => "a snapshot, served",
        }
    }

    /// How long a change lasts that is not written into the configuration.
    fn until(self, volume: Option<&VolumeConfig>) -> &'static str {
        match (self, volume) {
            // The size of a file or device without a `size` is its own.
            (Self::Resized, Some(volume)) if volume.path.is_some() && volume.size.is_none() => {
                "its file or device keeps this size, also after a restart"
            }
            _ => "until the target restarts or reloads; --persist keeps it",
        }
    }
}

/// Orders a change from the target, and then writes it down.
fn order(
    place: &ChangeArgs,
    file: Written,
    ask: Ask,
    kind: VolumeDeed,
    output: Output,
) -> anyhow::Result<Exit> {
    let running = &place.running;
    let done = kind.word();
    let Response::Volume(report) = asked(&socket_of(running)?, ask)? else {
        return Err(not_understood());
    };
    let written = match file {
        Written::No => Ok(None),
        Written::To(file) => persisted(&file, &report).map(Some),
        Written::Later => forgotten(running, &report).map(Some),
    };
    let written = written.with_context(|| {
        format!("the running target has {done} {}, but a restart undoes that", report.name)
    })?;
    let VolumeReport { name, volume, size_bytes, given_up, store_fault, contradiction } = &*report;
    output.answer(&report, || {
        let what = volume.as_ref().map(|volume| format!(", {}", described(volume, *size_bytes)));
        let stays = written.unwrap_or_else(|| kind.until(volume.as_ref()).to_owned());
        format!("{name}: {done}{}\n{name}: {stays}", what.unwrap_or_default())
    })?;
    if let Some(lost) = given_up {
        output.aside(format_args!("{name}: WARNING: its store did not take everything: {lost}"));
    }
    if let Some(fault) = store_fault {
        output.aside(format_args!("{name}: WARNING: {fault}"));
    }
    if let Some(found) = contradiction {
        output.aside(format_args!("{name}: WARNING: {found}"));
    }
    Ok(Exit::Ok)
}

/// Writes the file of a volume, or removes it. Returns the change of the file in words.
fn persisted(file: &VolumeFile, report: &VolumeReport) -> anyhow::Result<String> {
    let (path, is_there) = (file.path(), file.path().exists());
    Ok(match &report.volume {
        Some(volume) => {
            file.write(volume)?;
            match is_there {
                true => format!("{} is changed", path.display()),
                false => format!("written to {}", path.display()),
            }
        }
        None => {
            if is_there {
                file.remove()?;
            }
            format!("{} is gone", path.display())
        }
    })
}

/// Removes the file of a volume that was removed a while ago.
fn forgotten(running: &RunningArgs, report: &VolumeReport) -> anyhow::Result<String> {
    let file = VolumeFile::lock(&running.config, &report.name)?;
    // A command that adds a volume under this name now waits for the lock before that, or has the
    // file. A target that has stopped meanwhile serves nothing.
    let is_served_anew = status_of(&socket_of(running)?)
        .is_ok_and(|status| status.volumes.iter().any(|v| v.name == report.name));
    if is_served_anew {
        anyhow::bail!(
            "another command added a volume of that name meanwhile, so {} stays; `rblk-target volume list` shows it",
            file.path().display()
        );
    }
    persisted(&file, report)
}

fn described(volume: &VolumeConfig, bytes: u64) -> String {
    let mode = if volume.read_only { "read-only" } else { "read-write" };
    let cache = volume.cache.map(|cache| format!(", cache {cache}")).unwrap_or_default();
    let limits = match volume.limits {
        limits if limits.is_none() => String::new(),
        limits => format!(", limited to {limits}"),
    };
    let min = volume.cache_min.map(|min| format!(", keeps {min} of the cache"));
    let max = volume.cache_max.map(|max| format!(", at most {max} of the cache"));
    let [min, max] = [min, max].map(Option::unwrap_or_default);
    format!("{}, {mode}{cache}{min}{max}{limits}", ByteSize(bytes))
}

fn list(running: &RunningArgs, output: Output) -> anyhow::Result<Exit> {
    let status = status_of(&socket_of(running)?)?;
    output.answer(&status.volumes, || shown(&status))?;
    Ok(Exit::Ok)
}

/// The volumes of a target, and the faults that keep it from serving more or from keeping records.
fn shown(status: &TargetStatus) -> String {
    let mut text = table(&status.volumes);
    for fault in status.volumes.iter().filter_map(rblk_operate::target::warnings::store_fault) {
        text += &format!("WARN  {fault}\n");
    }
    for fault in rblk_operate::target::warnings::faults_of_target(status) {
        text += &format!("WARN  {fault}\n");
    }
    text
}

fn table(volumes: &[VolumeStatus]) -> String {
    let name = volumes.iter().map(|volume| volume.name.len()).max().unwrap_or(0).max(6);
    let head = ("VOLUME", "STORE", "SIZE", "MODE", "CACHE", "IOPS", "BYTES/S", "HELD BY");
    let mut text = format!(
        "{:<name$}  {:<6}  {:>9}  {:<4}  {:<13}  {:>7}  {:>9}  {}\n",
        head.0, head.1, head.2, head.3, head.4, head.5, head.6, head.7
    );
    let limit = |limit: Option<String>| limit.unwrap_or_else(|| "-".to_owned());
    for v in volumes {
        let snapshot = v.notes.snapshot_of.as_ref().map(|of| format!("  (of {of})"));
        let snapshot = snapshot.unwrap_or_default();
        let holder = match &v.holder {
            Some(holder) if holder.present => holder.host.clone(),
            Some(holder) => format!("{} (away)", holder.host),
            None if v.in_use => "(readers)".to_owned(),
            None => "-".to_owned(),
        };
        text += &format!(
            "{:<name$}  {:<6}  {:>9}  {:<4}  {:<13}  {:>7}  {:>9}  {holder}{snapshot}\n",
            v.name,
            v.store,
            ByteSize(v.size_bytes).to_string(),
            v.mode(),
            v.cache.to_string(),
            limit(v.limits.iops.map(|iops| iops.to_string())),
            limit(v.limits.bandwidth.map(|ByteRate(bytes)| ByteSize(bytes).to_string())),
        );
    }
    text
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, UNIX_EPOCH};

    use super::*;

    #[test]
    fn a_snapshot_is_named_by_the_second() {
        let now = UNIX_EPOCH + Duration::from_millis(1_700_000_000_999);
        assert_eq!(name_at("db", now), "db-20231114-221320");
    }
}
