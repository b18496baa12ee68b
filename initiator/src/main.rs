//! `rblk-initiator`: the commands of the initiator. Links no RDMA library: `mount` and `discover` are done by
//! `rblk-initiatord`, which stands beside this program.

use std::io::{BufRead, BufReader};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command as Process, ExitCode, Stdio};
use std::time::Duration;

use anyhow::Context;
use clap::Parser;
use rblk_config::{ByteSize, Exit};
use rblk_initiator::args::{Cli, Command, MountArgs, Output, Report, exit_of};
use rblk_initiator::mount::remains::{Remains, sweep};
use rblk_initiator::mount::socket::{Ask, Response, ask, names, socket_path};
use rblk_initiator::mount::status::MountStatus;
use rblk_initiator::mount::{NotMounted, NotRoot};
use rblk_initiator::ublk::Control;

const STATUS_TIME: Duration = Duration::from_secs(2);

fn main() -> ExitCode {
    die_of_closed_pipes();
    let result = match Cli::parse().command {
        Command::Mount(args) => mount(&args),
        Command::Umount { what, force } => umount(&what, force),
        Command::List { output } => list(output),
        Command::Discover { .. } => Err(become_daemon()),
    };
    match result {
        Ok(exit) => exit.into(),
        Err(error) => {
            eprintln!("rblk-initiator: {error:#}");
            exit_of(&error).into()
        }
    }
}

/// A reader that goes away (`| head`) ends this program like any other, instead of a panic in `println!`.
fn die_of_closed_pipes() {
    use nix::sys::signal::{SigHandler, Signal, signal};
    // SAFETY: the default disposition runs no code of ours.
    let _ = unsafe { signal(Signal::SIGPIPE, SigHandler::SigDfl) };
}

fn daemon() -> anyhow::Result<PathBuf> {
    Ok(std::env::current_exe()?.with_file_name("rblk-initiatord"))
}

/// Replaces this process by `rblk-initiatord` with the same arguments. Returns only the failure.
fn become_daemon() -> anyhow::Error {
    match daemon() {
        Ok(path) => {
            let error = Process::new(&path).args(std::env::args_os().skip(1)).exec();
            anyhow::Error::from(error)
                .context(format!("cannot run {}: is rblk installed whole?", path.display()))
        }
        Err(error) => error,
    }
}

fn mount(args: &MountArgs) -> anyhow::Result<Exit> {
    let config = args.configuration()?;
    if args.dump_config {
        print!("{}", config.dump()?);
        return Ok(Exit::Ok);
    }
    if !nix::unistd::geteuid().is_root() {
        return Err(NotRoot.into());
    }
    if args.foreground {
        return Err(become_daemon());
    }
    let name = args.mount_name(&config)?;
    let path = daemon()?;
    let log = log_path(&name);
    if let Some(dir) = log.parent() {
        std::fs::create_dir_all(dir).with_context(|| format!("making {}", dir.display()))?;
    }
    let log_file = std::fs::OpenOptions::new()
        .create(true)
        .append(true)
        .open(&log)
        .with_context(|| format!("opening the log {}", log.display()))?;
    // A session of its own, so that a hang-up of this terminal is none of its business. It is started anew
    // and not forked: RDMA objects do not survive a fork.
    let mut child = Process::new("setsid")
        .arg(&path)
        .args(std::env::args_os().skip(1))
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(log_file)
        .current_dir("/")
        .spawn()
        .with_context(|| format!("cannot run {}: is rblk installed whole?", path.display()))?;
    let mut line = String::new();
    if let Some(out) = child.stdout.take() {
        BufReader::new(out).read_line(&mut line)?;
    }
    match serde_json::from_str(&line) {
        Ok(Report::Mounted(status)) => {
            match args.output {
                Output::Table => println!("{}", status.device),
                Output::Json => println!("{}", serde_json::to_string_pretty(&status)?),
            }
            Ok(Exit::Ok)
        }
        Ok(Report::Failed { error, exit }) => {
            let _ = child.wait();
            // It ended in good order: the log has nothing that is not said here.
            let _ = std::fs::remove_file(&log);
            eprintln!("rblk-initiator: {error}");
            Ok(Exit::ALL.into_iter().find(|e| e.code() == exit).unwrap_or(Exit::Failure))
        }
        Err(_) => {
            anyhow::bail!("rblk-initiatord ended without a word; its log is {}", log.display())
        }
    }
}

fn log_path(name: &str) -> PathBuf {
    Path::new("/run/rblk/log").join(format!("{name}.log"))
}

fn umount(what: &str, force: bool) -> anyhow::Result<Exit> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        let mut found = None;
        for name in names() {
            if name == what || what.starts_with("/dev/") {
                let left = || Remains::read(&name).map(|r| format!("/dev/ublkb{}", r.device_id));
                match status(&name).await {
                    Some(status) if name == what || status.device == what => found = Some(name),
                    None if left().is_some_and(|device| device == what) => found = Some(name),
                    // Dead, but its name was given: the file is swept below.
                    None if name == what => found = Some(name),
                    _ => {}
                }
            }
        }
        let Some(name) = found else { return Err(NotMounted { what: what.to_owned() }.into()) };
        let path = socket_path(&name);
        let time = if force { Duration::from_secs(5) } else { Duration::from_secs(60) };
        match ask(&path, Ask::Unmount { force }, time).await {
            Ok(Response::Done) => {
                let _ = std::fs::remove_file(log_path(&name));
                Ok(Exit::Ok)
            }
            Ok(Response::Busy(text)) => {
                eprintln!("rblk-initiator: {text}");
                Ok(Exit::Failure)
            }
            Ok(Response::Error(text)) => anyhow::bail!(text),
            Ok(Response::Status(_)) => anyhow::bail!("the mount answered something else"),
            Err(error) if error.kind() == std::io::ErrorKind::ConnectionRefused => {
                // Its process died: the device it left goes, and then its socket.
                let mut control = Control::open()?;
                sweep(&mut control, &name)?;
                std::fs::remove_file(&path)
                    .with_context(|| format!("removing {}", path.display()))?;
                eprintln!("{name}: its process had died; removed its device");
                Ok(Exit::Ok)
            }
            Err(error) => {
                Err(error).with_context(|| format!("asking the mount at {}", path.display()))
            }
        }
    })
}

async fn status(name: &str) -> Option<MountStatus> {
    match ask(&socket_path(name), Ask::Status, STATUS_TIME).await {
        Ok(Response::Status(status)) => Some(*status),
        _ => None,
    }
}

fn list(output: Output) -> anyhow::Result<Exit> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let mut mounts = Vec::new();
    let mut dead = Vec::new();
    runtime.block_on(async {
        for name in names() {
            match status(&name).await {
                Some(status) => mounts.push(status),
                None => dead.push(name),
            }
        }
    });
    if output == Output::Json {
        println!("{}", serde_json::to_string_pretty(&mounts)?);
        return Ok(Exit::Ok);
    }
    println!(
        "{:<20} {:<14} {:>10} {:<13} {:>6} {:<12} TARGET",
        "NAME", "DEVICE", "SIZE", "STATE", "QUEUES", "TRANSPORT"
    );
    for m in &mounts {
        println!(
            "{:<20} {:<14} {:>10} {:<13} {:>6} {:<12} {} ({})",
            m.name,
            m.device,
            ByteSize(m.size_bytes).to_string(),
            m.state,
            m.queues,
            m.transport,
            m.address,
            m.target_name
        );
    }
    for m in mounts.iter().filter(|m| m.loss_untold) {
        eprintln!(
            "{}: its target lost writes that were not flushed; the next fsync there will fail to say so",
            m.name
        );
    }
    for name in dead {
        eprintln!(
            "{name}: its process does not answer; `rblk-initiator umount {name}` removes what a dead one left"
        );
    }
    Ok(Exit::Ok)
}
