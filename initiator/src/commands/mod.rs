//! `rblk-initiator`: the commands of the initiator. Links no RDMA library: `rblk-initiatord`, in
//! the same directory, does `mount` and `discover`.

use std::ffi::OsStr;
use std::io::{BufRead, BufReader};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command as Process, ExitCode, Stdio};
use std::time::{Duration, Instant};

use self::args::{
    CHECKED, Cli, Command, DeadMount, DoctorArgs, MountArgs, RecoverArgs, Report, StartFailed,
    VhostArgs, exit_of,
};
use crate::daemon::log_file;
use crate::front::ublk::{DeviceInfo, disk_path};
use crate::mount::device::holder::Use;
use crate::mount::device::image;
use crate::mount::lock::MountLock;
use crate::mount::note::leftovers::{self, Condition};
use crate::mount::run_dir::{must_be_readable, names};
use crate::mount::socket::{Ask, Response, ask, socket_path};
use crate::mount::{NotInBackground, NotMounted, NotRoot};
use crate::volume::status::MountStatus;
use anyhow::Context;
use rblk_config::{Exit, MountConfig};
use rblk_operate::{Output, said_once};
use rblk_protocol::auth::PublicKey;
use serde::Serialize;
use tokio::runtime::Runtime;

pub mod args;
pub mod doctor;
mod examples;
mod key;
mod metrics;
mod silent;
mod table;
mod top;
mod umount;

use silent::Silent;

const STATUS_TIME: Duration = Duration::from_secs(2);
/// Time for a mount to measure its rates.
const RATES_TIME: Duration = Duration::from_millis(1100);
/// Time for a program to start and report whether it could serve a mount. Nothing has changed then.
const CHECK_TIME: Duration = Duration::from_secs(20);
/// Time for a program to replace another: the driver may need that long to notice it.
const UPGRADE_TIME: Duration = Duration::from_secs(60);

/// Does what the command line of this process says.
#[must_use]
pub fn main() -> ExitCode {
    let cli = match Cli::of_process() {
        Ok(cli) => cli,
        Err(code) => return code,
    };
    let output = cli.output;
    let result = match cli.command {
        Command::Mount(args) => mount(&args, output),
        Command::Vhost(args) => vhost(&args, output),
        Command::Umount { what, file_systems, force } => {
            umount::umount(&what, file_systems, force, output)
        }
        Command::Recover(args) => recover(&args, output),
        Command::Upgrade { which, program } => upgrade(which.name.as_deref(), program, output),
        Command::Reload { which, target_key } => reload(which.name.as_deref(), &target_key, output),
        Command::List => list(output),
        Command::Metrics { write } => metrics::metrics(write.as_deref(), output),
        Command::Status { name } => show(&name, output),
        Command::Top { interval, once } => top::top(interval.0, once, output),
        Command::Key(command) => key::key(&command, output),
        Command::Doctor(args) => doctor(&args, output),
        Command::LookAt { disk, size_bytes, block_size } => {
            image::here(&disk, size_bytes, block_size).map(|()| Exit::Ok).map_err(Into::into)
        }
        Command::Discover { .. } | Command::WriteBack { .. } => Err(become_daemon()),
    };
    match result {
        Ok(exit) => output.end("rblk-initiator", exit, None),
        Err(error) => {
            output.end("rblk-initiator", exit_of(&error), Some(&said_once(error.as_ref())))
        }
    }
}

fn daemon() -> anyhow::Result<PathBuf> {
    Ok(std::env::current_exe()?.with_file_name("rblk-initiatord"))
}

/// Replaces this process by `rblk-initiatord` with the same arguments. Returns only the failure.
fn become_daemon() -> anyhow::Error {
    match daemon().and_then(|path| close_lent_on_exec().map(|()| path)) {
        Ok(path) => {
            let (variable, value) = rblk_fabric::ENVIRONMENT;
            let error =
                Process::new(&path).args(std::env::args_os().skip(1)).env(variable, value).exec();
            anyhow::Error::from(error)
                .context(format!("cannot run {}: is rblk installed whole?", path.display()))
        }
        Err(error) => error,
    }
}

/// Closes the descriptors of the calling script or terminal, so that the daemon does not inherit
/// them.
fn close_lent_on_exec() -> anyhow::Result<()> {
    rblk_runtime::close_lent_on_exec().context("closing what this process inherited (close_range)")
}

fn doctor(args: &DoctorArgs, output: Output) -> anyhow::Result<Exit> {
    let report = doctor::doctor(args, &daemon()?)?;
    output.answer(&report, || report.to_string())?;
    Ok(report.exit())
}

fn mount(args: &MountArgs, output: Output) -> anyhow::Result<Exit> {
    let config = args.configuration()?;
    if args.dump_config {
        output.toml(&config.dump()?)?;
        return Ok(Exit::Ok);
    }
    if !nix::unistd::geteuid().is_root() {
        return Err(NotRoot.into());
    }
    start(args, &config, output)
}

/// Serves in this process, or starts the process that serves.
fn start(args: &MountArgs, config: &MountConfig, output: Output) -> anyhow::Result<Exit> {
    if args.foreground {
        return Err(become_daemon());
    }
    let name = args.mount_name(config)?;
    let status = start_daemon(&name, std::env::args_os().skip(1))?;
    output.answer(&status, || status.device.clone())?;
    if output == Output::Table {
        if let Some(line) = status.fallback_line() {
            output.aside(format_args!("rblk-initiator: WARN {name}: {line}"));
        }
        if let Some(found) = image::elsewhere(&status) {
            output.aside(format_args!("{}: WARNING: {found}", status.name));
        }
    }
    Ok(Exit::Ok)
}

fn vhost(args: &VhostArgs, output: Output) -> anyhow::Result<Exit> {
    let config = args.configuration()?;
    if args.mount.dump_config {
        output.toml(&config.dump()?)?;
        return Ok(Exit::Ok);
    }
    if !args.mount.foreground && !nix::unistd::geteuid().is_root() {
        return Err(NotInBackground.into());
    }
    start(&args.mount, &config, output)
}

/// Starts a daemon for the mount of a name, in the background, and waits until it reports success
/// or failure.
fn start_daemon(
    name: &str,
    args: impl IntoIterator<Item = impl AsRef<OsStr>>,
) -> anyhow::Result<Box<MountStatus>> {
    let path = daemon()?;
    let log = log_file::path_of(name);
    let was_there = log.exists();
    if let Some(dir) = log.parent() {
        crate::mount::run_dir::make_private(dir)
            .with_context(|| format!("making {}", dir.display()))?;
    }
    let known = names();
    log_file::remove_old(|other| other == name || known.iter().any(|known| known == other));
    let log_file =
        log_file::open(&log).with_context(|| format!("opening the log {}", log.display()))?;
    close_lent_on_exec()?;
    // In a session of its own, so that a hang-up of this terminal does not reach it. The daemon is
    // started by exec, not only by fork: RDMA objects do not survive a fork.
    let (variable, value) = rblk_fabric::ENVIRONMENT;
    let mut child = Process::new("setsid")
        .arg(&path)
        .args(args)
        .env(variable, value)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(log_file)
        .spawn()
        .with_context(|| format!("cannot run {}: is rblk installed whole?", path.display()))?;
    let mut line = String::new();
    if let Some(out) = child.stdout.take() {
        BufReader::new(out).read_line(&mut line)?;
    }
    match serde_json::from_str(&line) {
        Ok(Report::Mounted(status)) => Ok(status),
        Ok(Report::Failed { error, exit }) => {
            let _ = child.wait();
            if !was_there {
                // The process ended in good order: its log adds nothing to the report here.
                let _ = std::fs::remove_file(&log);
            }
            let exit = Exit::of_code(exit).unwrap_or(Exit::Failure);
            Err(StartFailed { error, exit }.into())
        }
        Err(_) => {
            anyhow::bail!("rblk-initiatord ended without a word; its log is {}", log.display())
        }
    }
}

/// The result for one of several mounts, in JSON.
#[derive(Serialize)]
struct Came<T> {
    name: String,
    /// The new state. Null: it failed.
    outcome: Option<T>,
    /// The reason for the failure.
    error: Option<String>,
}

/// Recovers mounts after their processes died. With several mounts, each is tried; the exit code is
/// that of the first failure.
fn recover(args: &RecoverArgs, output: Output) -> anyhow::Result<Exit> {
    if let Some(name) = &args.which.name {
        must_be_known(name)?;
    }
    if !nix::unistd::geteuid().is_root() {
        return Err(NotRoot.into());
    }
    if args.foreground || args.check {
        return Err(become_daemon());
    }
    let verbose = std::iter::repeat_n("-v", args.verbose.into());
    if let Some(name) = &args.which.name {
        let status = start_daemon(name, ["recover", name].into_iter().chain(verbose))?;
        output.answer(&status, || status.device.clone())?;
        return Ok(Exit::Ok);
    }
    let (mut exit, mut came) = (Exit::Ok, Vec::new());
    for name in names() {
        if MountLock::is_held(&name) {
            continue;
        }
        if leftovers::find(&name)?.note.is_ok_and(|note| note.is_none()) {
            continue;
        }
        let flags = ["recover", &name].into_iter().chain(verbose.clone());
        match start_daemon(&name, flags) {
            Ok(status) => {
                output.text(&status.device)?;
                came.push(Came { name, outcome: Some(status), error: None });
            }
            Err(error) => {
                let text = said_once(error.as_ref());
                output.aside(match error.is::<StartFailed>() {
                    true => format!("rblk-initiator: {text}"),
                    false => format!("rblk-initiator: {name}: {text}"),
                });
                let failed = exit_of(&error);
                // A recovery clears the leftovers of a mount after a restart of the machine, or of
                // a mount without a device. That is no failure.
                if exit == Exit::Ok && failed != Exit::NotConnected {
                    exit = failed;
                }
                came.push(Came { name, outcome: None, error: Some(text) });
            }
        }
    }
    output.answer(&came, String::new)?;
    Ok(exit)
}

/// Refuses a name without a mount, living or dead.
fn must_be_known(name: &str) -> anyhow::Result<()> {
    rblk_protocol::Name::new(name).with_context(|| format!("the name {name}"))?;
    must_be_readable()?;
    if names().iter().any(|known| known == name) {
        return Ok(());
    }
    Err(NotMounted { what: name.to_owned() }.into())
}

/// Hands one mount, or all, over to a program.
fn upgrade(name: Option<&str>, program: Option<PathBuf>, output: Output) -> anyhow::Result<Exit> {
    if let Some(name) = name {
        must_be_known(name)?;
    }
    if !nix::unistd::geteuid().is_root() {
        return Err(NotRoot.into());
    }
    let program = match program {
        Some(program) => std::path::absolute(program)?,
        None => daemon()?,
    };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let one = |name: &str| runtime.block_on(upgrade_one(name, &program));
    of_living(name, output, one, upgraded)
}

/// The versions of the programs before and after an upgrade.
#[derive(Serialize)]
struct Versions {
    from_version: String,
    to_version: String,
}

async fn upgrade_one(name: &str, program: &Path) -> anyhow::Result<Versions> {
    let before = status(name).await.ok_or_else(|| NotMounted { what: name.to_owned() })?;
    // Before any change.
    check_program(program, name).await?;
    let upgrade = Ask::Upgrade { program: program.to_owned() };
    // The process may be replaced before its answer gets out. The process that serves the mount
    // afterwards decides.
    if let Ok(Response::Error(text) | Response::Busy(text)) =
        ask(&socket_path(name), upgrade, STATUS_TIME).await
    {
        anyhow::bail!(text);
    }
    let begun = Instant::now();
    while begun.elapsed() < UPGRADE_TIME {
        if let Some(now) = status(name).await
            && now.recovered > before.recovered
        {
            return Ok(Versions { from_version: before.version, to_version: now.version });
        }
        // The lock goes from one program to the next without a gap.
        if !MountLock::is_held(name) {
            anyhow::bail!("the process ended; `rblk-initiator recover {name}` recovers it");
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    anyhow::bail!(
        "no process has served {} for {UPGRADE_TIME:?}; see the log, and `rblk-initiator list`",
        before.device
    )
}

/// Has one mount, or all, read the keys again.
fn reload(name: Option<&str>, target_keys: &[PublicKey], output: Output) -> anyhow::Result<Exit> {
    must_be_readable()?;
    if let Some(name) = name {
        must_be_known(name)?;
    }
    let keys: Vec<String> = target_keys.iter().map(ToString::to_string).collect();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let one = |name: &str| runtime.block_on(reload_one(name, &keys));
    of_living(name, output, one, |name, said| format!("{name}: {said}"))
}

/// Runs an action for one mount, or for each mount with a process, and reports the results. With
/// several mounts, each is tried.
fn of_living<T: Serialize>(
    name: Option<&str>,
    output: Output,
    one: impl Fn(&str) -> anyhow::Result<T>,
    words: impl Fn(&str, &T) -> String,
) -> anyhow::Result<Exit> {
    if let Some(name) = name {
        let outcome = one(name)?;
        output.aside(words(name, &outcome));
        let came = Came { name: name.to_owned(), outcome: Some(outcome), error: None };
        output.answer(&came, String::new)?;
        return Ok(Exit::Ok);
    }
    let (mut exit, mut came) = (Exit::Ok, Vec::new());
    for name in names().into_iter().filter(|name| MountLock::is_held(name)) {
        match one(&name) {
            Ok(outcome) => {
                output.aside(words(&name, &outcome));
                came.push(Came { name, outcome: Some(outcome), error: None });
            }
            Err(error) => {
                let text = said_once(error.as_ref());
                output.aside(format_args!("rblk-initiator: {name}: {text}"));
                exit = Exit::Failure;
                came.push(Came { name, outcome: None, error: Some(text) });
            }
        }
    }
    output.answer(&came, String::new)?;
    Ok(exit)
}

async fn reload_one(name: &str, target_keys: &[String]) -> anyhow::Result<String> {
    let reload = Ask::Reload { target_keys: target_keys.to_vec() };
    match ask(&socket_path(name), reload, STATUS_TIME).await {
        Ok(Response::Reloaded(text)) => Ok(text),
        // An older program does not know this request.
        Ok(Response::Error(text)) if text.starts_with("not a request") => {
            anyhow::bail!(
                "it runs an older version; `rblk-initiator upgrade {name}` reads the keys, too"
            )
        }
        Ok(Response::Error(text) | Response::Busy(text)) => anyhow::bail!(text),
        Ok(_) => anyhow::bail!("the mount answered something else"),
        Err(_) if !MountLock::is_held(name) => Err(NotMounted { what: name.to_owned() }.into()),
        Err(error) => Err(error).context("asking the mount"),
    }
}

/// The result of an upgrade, in words.
fn upgraded(name: &str, versions: &Versions) -> String {
    let Versions { from_version: before, to_version: now } = versions;
    if before == now {
        return format!("{name}: a new process serves it, of the same version {now}");
    }
    format!("{name}: version {now} instead of {before}")
}

/// Asks a program whether it can recover the mount of a name.
async fn check_program(program: &Path, name: &str) -> anyhow::Result<()> {
    let mut process = Process::new(program);
    process.args(["recover", "--check", name]).stdin(Stdio::null());
    let asked = tokio::task::spawn_blocking(move || process.output());
    let output = tokio::time::timeout(CHECK_TIME, asked)
        .await
        .with_context(|| format!("{} does not end", program.display()))??;
    let output = output.with_context(|| format!("cannot run {}", program.display()))?;
    if !output.status.success() || !output.stdout.starts_with(CHECKED.as_bytes()) {
        anyhow::bail!(
            "{} cannot recover mount `{name}`: {}",
            program.display(),
            String::from_utf8_lossy(&output.stderr).trim()
        );
    }
    Ok(())
}

/// The use of a disk, for a table.
fn used_by(device: &str) -> Option<String> {
    Use::find(device).map(|used| used.to_string())
}

/// A line about a mount that has lost its target: the time, the reason, and the state of its
/// requests.
fn outage(mount: &MountStatus) -> Option<String> {
    let why = mount.last_loss.as_deref().map(|why| format!(": {why}")).unwrap_or_default();
    if mount.state == "waiting" {
        return Some(format!("{}: it waits for its target{why}", mount.name));
    }
    let since = Duration::from_millis(mount.lost_ms_ago?);
    let what = match mount.state.as_str() {
        "reconnecting" => "its target is lost, and requests wait",
        "failing" => "its target is lost, and requests fail until it is back",
        "volume removed" => {
            "its target removed the volume, and requests fail until it is served again"
        }
        "fenced" => "it is fenced from its volume, and every request fails; unmount it",
        "volume lost" => "its volume is another one now, and every request fails; unmount it",
        _ => return None,
    };
    Some(format!("{}: {what} (for {} s{why})", mount.name, since.as_secs()))
}

async fn status(name: &str) -> Option<MountStatus> {
    match ask(&socket_path(name), Ask::Status, STATUS_TIME).await {
        Ok(Response::Status(status)) => Some(*status),
        _ => None,
    }
}

/// The mounts that answer. With `rates`, they have measured rates; the first question takes a
/// second for that.
fn living(runtime: &Runtime, rates: bool) -> Vec<MountStatus> {
    let ask_all = || -> Vec<MountStatus> {
        names().iter().filter_map(|name| runtime.block_on(status(name))).collect()
    };
    let mounts = ask_all();
    if rates && mounts.iter().any(measures) {
        std::thread::sleep(RATES_TIME);
        return ask_all();
    }
    mounts
}

/// Whether a mount is measuring its rates. An older process measures none.
fn measures(mount: &MountStatus) -> bool {
    mount.rates.is_none() && mount.state == "connected" && !mount.latency_by_queue.is_empty()
}

/// Shows one mount in full.
fn show(name: &str, output: Output) -> anyhow::Result<Exit> {
    must_be_readable()?;
    must_be_known(name)?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let status = match runtime.block_on(status(name)) {
        Some(status) => status,
        None => {
            let mut dead_ones = Vec::new();
            let line = dead(name, &mut dead_ones);
            let Some(status) = dead_ones.pop() else {
                let gone = || anyhow::Error::from(NotMounted { what: name.to_owned() });
                return Err(line.map_or_else(gone, |line| DeadMount(line.line().to_owned()).into()));
            };
            line.iter().for_each(|line| output.aside(line.line()));
            status
        }
    };
    output.answer(&status, || table::mount(&status, used_by))?;
    Ok(Exit::Ok)
}

/// Every mount of this host, dead ones too, and the problems of mounts that do not answer.
fn all_mounts(names: &[String], rates: bool) -> anyhow::Result<(Vec<MountStatus>, Vec<Silent>)> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let mut mounts = living(&runtime, rates);
    let mut silent = Vec::new();
    for name in names {
        if !mounts.iter().any(|mount| mount.name == *name) {
            silent.extend(dead(name, &mut mounts));
        }
    }
    mounts.sort_by(|a, b| a.name.cmp(&b.name));
    Ok((mounts, silent))
}

fn list(output: Output) -> anyhow::Result<Exit> {
    must_be_readable()?;
    let names = names();
    let (mounts, mut silent) = all_mounts(&names, output == Output::Table)?;
    let without_note = |info: &DeviceInfo| {
        Silent::disk(disk_path(info.id).display().to_string(), umount::line_without_note(info))
    };
    silent.extend(leftovers::without_note().unwrap_or_default().iter().map(without_note));
    output.answer(&silent::entries(&mounts, &silent), || table::mounts(&mounts, used_by))?;
    let lost = |m: &MountStatus| m.lost().map(|lost| format!("{}: lost: {lost}", m.name));
    let fallback = |m: &MountStatus| m.fallback_line().map(|line| format!("{}: {line}", m.name));
    let hint = |m: &MountStatus| m.hint.as_ref().map(|hint| format!("{}: {hint}", m.name));
    let notes = mounts.iter().filter_map(outage);
    let notes = notes.chain(mounts.iter().filter_map(fallback));
    let notes = notes.chain(mounts.iter().filter_map(hint));
    let notes = notes.chain(mounts.iter().filter_map(other_size));
    let notes = notes.chain(mounts.iter().filter_map(lost));
    notes.for_each(|line| output.aside(line));
    silent.iter().for_each(|silent| output.aside(silent.line()));
    Ok(Exit::Ok)
}

/// A line about a disk that could not follow its volume.
fn other_size(mount: &MountStatus) -> Option<String> {
    let (disk, volume) = (mount.disk_size_bytes, mount.size_bytes);
    let differs = disk != 0 && disk != volume;
    differs.then(|| {
        format!(
            "{}: its disk has {disk} bytes and its volume {volume}: this kernel cannot resize a disk in use (Linux \
             6.16 can); unmount, and mount again",
            mount.name
        )
    })
}

/// The problem of a mount that does not answer. The mount is listed if it has a device.
fn dead(name: &str, mounts: &mut Vec<MountStatus>) -> Option<Silent> {
    let silent = |state, problem| Some(Silent::mount(name, state, problem));
    if MountLock::is_held(name) {
        return silent("no answer", format!("{name}: its process does not answer"));
    }
    let found = match leftovers::find(name) {
        Ok(found) => found,
        Err(error) => return silent("dead", format!("{name}: its process died; {error}")),
    };
    let word = found.condition.word()?;
    if let Ok(Some(note)) = &found.note {
        mounts.push(note.status(word));
    }
    match found.condition {
        Condition::Nothing | Condition::Running => None,
        Condition::Unusable => silent(word, found.note.err()?.to_string()),
        Condition::Ending | Condition::Waiting => silent(
            word,
            format!(
                "{name}: its process died and requests wait; `rblk-initiator recover {name}` recovers it, \
                 `rblk-initiator umount --force {name}` fails them"
            ),
        ),
        Condition::Diskless | Condition::Gone => silent(
            word,
            format!("{name}: its process died; `rblk-initiator umount {name}` clears what it left"),
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_upgrade_to_the_same_version_does_not_look_like_a_mistake() {
        let of = |before: &str, now: &str| {
            let versions = Versions { from_version: before.to_owned(), to_version: now.to_owned() };
            upgraded("m", &versions)
        };
        assert_eq!(of("0.1.0", "0.2.0"), "m: version 0.2.0 instead of 0.1.0");
        assert_eq!(of("0.1.0", "0.1.0"), "m: a new process serves it, of the same version 0.1.0");
    }
}
