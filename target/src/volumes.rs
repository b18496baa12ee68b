//! `rblk-target volume`: the volumes of the target that runs. The target changes first, since it
//! knows who uses them; the file of the configuration follows, if that is asked for. Before either,
//! the configuration with the change is checked.

use std::path::Path;
use std::time::SystemTime;

use anyhow::Context;
use rblk_config::{
    ByteRate, ByteSize, Exit, Limits, TargetConfig, VolumeConfig, VolumeFile, named_in_rights,
};
use rblk_target::args::{
    ChangeArgs, Output, RunningArgs, VolumeAddArgs, VolumeCommand, VolumeRemoveArgs,
    VolumeResizeArgs, VolumeSetArgs, VolumeSnapshotArgs,
};
use rblk_target::control::socket::{Ask, Response, VolumeReport};
use rblk_target::control::status::VolumeStatus;

use crate::host::Senseless;
use crate::running::socket_of;
use crate::{asked, not_understood};

/// Does what was asked.
pub(crate) fn volume(command: &VolumeCommand) -> anyhow::Result<Exit> {
    match command {
        VolumeCommand::Add(args) => add(args),
        VolumeCommand::Remove(args) => remove(args),
        VolumeCommand::Resize(args) => resize(args),
        VolumeCommand::Set(args) => set(args),
        VolumeCommand::Snapshot(args) => snapshot(args),
        VolumeCommand::List(running) => list(running),
    }
}

fn add(args: &VolumeAddArgs) -> anyhow::Result<Exit> {
    let name = args.name.clone();
    let mut volume = match (&args.file, args.memory, args.null) {
        (Some(path), _, _) => VolumeConfig::file(name, std::path::absolute(path)?),
        (_, Some(size), _) => VolumeConfig::memory(name, size),
        (_, _, size) => VolumeConfig::null(name, size.unwrap_or(ByteSize(0))),
    };
    volume.block_size = args.block_size;
    volume.read_only = args.read_only;
    volume.cache = args.cache;
    volume.read_ahead = args.read_ahead.unwrap_or(volume.read_ahead);
    volume.cache_min = args.cache_min;
    volume.cache_max = args.cache_max;
    let volume = volume.with_limits(args.limits.wish().on(Limits::default()));
    let file = file_of(&args.place, &args.name)?;
    if let Some(file) = &file {
        file.check(&volume)?;
    }
    order(&args.place, file.into(), Ask::AddVolume { volume: Box::new(volume) }, "served")
}

fn remove(args: &VolumeRemoveArgs) -> anyhow::Result<Exit> {
    let file = file_of(&args.place, &args.name)?;
    if file.is_some() {
        let hosts = TargetConfig::load(&args.place.running.config)?.hosts;
        if let Some(rights) = named_in_rights(&hosts, &args.name) {
            return Err(Senseless(rights).into());
        }
    }
    if let Some(file) = &file
        && file.check_without()?.volumes.iter().any(|volume| volume.name == args.name)
    {
        return Err(elsewhere(&args.name, file.path(), "remove it there").into());
    }
    let VolumeRemoveArgs { name, force, drain, .. } = args;
    let question = Ask::RemoveVolume { name: name.clone(), force: *force, drain: *drain };
    let file = match file {
        // Others may write their files for as long as hosts use the volume.
        Some(file) if *drain => {
            drop(file);
            Written::Later
        }
        file => file.into(),
    };
    order(&args.place, file, question, "removed")
}

fn resize(args: &VolumeResizeArgs) -> anyhow::Result<Exit> {
    if !args.place.persist {
        must_not_be_fixed(&args.place.running.config, &args.name)?;
    }
    let file = changed_file(&args.place, &args.name)?;
    let VolumeResizeArgs { name, size, shrink, .. } = args;
    let question = Ask::ResizeVolume { name: name.clone(), size: *size, shrink: *shrink };
    order(&args.place, file.into(), question, "changed")
}

/// The file must not have a size in the configuration that is not changed with it: the target would
/// not start again.
fn must_not_be_fixed(config: &Path, name: &str) -> anyhow::Result<()> {
    if !config.exists() {
        return Ok(());
    }
    let config = TargetConfig::load(config)?;
    let volume = config.volumes.iter().find(|volume| volume.name == name);
    match volume.filter(|volume| volume.path.is_some()).and_then(|volume| volume.size) {
        None => Ok(()),
        Some(size) => Err(Senseless(format!(
            "the configuration says that the file of {name} has {size}, and the target does not start with a file \
             of another size: change it with --persist, or change it there and run `rblk-target reload`"
        ))
        .into()),
    }
}

fn set(args: &VolumeSetArgs) -> anyhow::Result<Exit> {
    let file = changed_file(&args.place, &args.name)?;
    let VolumeSetArgs { name, read_only, cache, read_ahead, cache_min, cache_max, limits, .. } =
        args;
    let question = Ask::SetVolume {
        name: name.clone(),
        read_only: *read_only,
        cache: *cache,
        read_ahead: *read_ahead,
        cache_min: *cache_min,
        cache_max: *cache_max,
        limits: limits.wish(),
    };
    order(&args.place, file.into(), question, "changed")
}

fn snapshot(args: &VolumeSnapshotArgs) -> anyhow::Result<Exit> {
    let new_name = args.new_name.clone().unwrap_or_else(|| name_at(&args.name, SystemTime::now()));
    let path = args.path.as_ref().map(std::path::absolute).transpose()?;
    let file = file_of(&args.place, &new_name)?;
    if let Some(file) = &file
        && (file.read()?.is_some()
            || file.check_without()?.volumes.iter().any(|volume| volume.name == new_name))
    {
        return Err(Senseless(format!(
            "the configuration has a volume {new_name} already: name another one with --as"
        ))
        .into());
    }
    let question = Ask::SnapshotVolume { name: args.name.clone(), new_name, path };
    order(&args.place, file.into(), question, "a snapshot, served")
}

/// The name of a snapshot that nobody named.
fn name_at(name: &str, now: SystemTime) -> String {
    let time = humantime::format_rfc3339_seconds(now).to_string();
    let digits = |part: &str| part.chars().filter(char::is_ascii_digit).collect::<String>();
    let (day, time) = time.split_once('T').unwrap_or((&time, ""));
    format!("{name}-{}-{}", digits(day), digits(time))
}

/// The file that a change is written to, if it is to stay.
fn file_of(place: &ChangeArgs, name: &str) -> anyhow::Result<Option<VolumeFile>> {
    match place.persist {
        true => Ok(Some(VolumeFile::lock(&place.running.config, name)?)),
        false => Ok(None),
    }
}

/// The same for a volume that is there: people must not have written it into another file.
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

fn elsewhere(name: &str, file: &Path, what: &str) -> Senseless {
    Senseless(format!(
        "{name} is not in {}, so people wrote it into another file of the configuration: {what}, then run \
         `rblk-target reload`; or leave --persist away",
        file.display()
    ))
}

/// The file that a change is written to.
enum Written {
    No,
    /// Locked since before the change, so that files and changes have one order.
    To(VolumeFile),
    /// It is locked when the volume is gone.
    Later,
}

impl From<Option<VolumeFile>> for Written {
    fn from(file: Option<VolumeFile>) -> Self {
        file.map_or(Self::No, Self::To)
    }
}

/// Has the target do it, and then writes it down.
fn order(place: &ChangeArgs, file: Written, question: Ask, done: &str) -> anyhow::Result<Exit> {
    let running = &place.running;
    let report = match asked(&socket_of(running)?, question)? {
        Ok(Response::Volume(report)) => report,
        Ok(_) => return Err(not_understood()),
        Err(exit) => return Ok(exit),
    };
    let written = match file {
        Written::No => Ok(None),
        Written::To(file) => persisted(&file, &report).map(Some),
        Written::Later => forgotten(running, &report).map(Some),
    };
    let written = written.with_context(|| {
        format!("the running target has {done} {}, but a restart undoes that", report.name)
    })?;
    if running.output == Output::Json {
        println!("{}", serde_json::to_string_pretty(&report)?);
        return Ok(Exit::Ok);
    }
    let VolumeReport { name, volume, size_bytes, given_up, store_fault } = &*report;
    match volume {
        Some(volume) => println!("{name}: {done}, {}", described(volume, *size_bytes)),
        None => println!("{name}: {done}"),
    }
    if let Some(lost) = given_up {
        eprintln!("{name}: WARNING: its store did not take everything: {lost}");
    }
    if let Some(fault) = store_fault {
        eprintln!("{name}: WARNING: {fault}");
    }
    match written {
        Some(written) => println!("{name}: {written}"),
        None => println!("{name}: until the target restarts or reloads; --persist keeps it"),
    }
    Ok(Exit::Ok)
}

/// Writes the file of a volume, or removes it. Returns what became of the file.
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
    // Whoever adds a volume under this name now waits for the lock before that, or has the file.
    let is_served_anew = match asked(&socket_of(running)?, Ask::Status)? {
        Ok(Response::Status(status)) => status.volumes.iter().any(|v| v.name == report.name),
        Ok(_) => return Err(not_understood()),
        // A target that has stopped meanwhile serves nothing.
        Err(_) => false,
    };
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
    let limits = match volume.limits() {
        limits if limits.is_none() => String::new(),
        limits => format!(", limited to {limits}"),
    };
    let min = volume.cache_min.map(|min| format!(", keeps {min} of the cache"));
    let max = volume.cache_max.map(|max| format!(", at most {max} of the cache"));
    let [min, max] = [min, max].map(Option::unwrap_or_default);
    format!("{}, {mode}{cache}{min}{max}{limits}", ByteSize(bytes))
}

fn list(running: &RunningArgs) -> anyhow::Result<Exit> {
    match asked(&socket_of(running)?, Ask::Status)? {
        Ok(Response::Status(status)) if running.output == Output::Json => {
            println!("{}", serde_json::to_string_pretty(&status.volumes)?);
        }
        Ok(Response::Status(status)) => print!("{}", table(&status.volumes)),
        Ok(_) => return Err(not_understood()),
        Err(exit) => return Ok(exit),
    }
    Ok(Exit::Ok)
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
    for fault in volumes.iter().filter_map(rblk_target::warnings::store_fault) {
        text += &format!("WARN  {fault}\n");
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
