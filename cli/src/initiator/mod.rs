//! The commands of `rblk-initiator`. They link no RDMA library: `rblk-initiatord`, in the same
//! directory, serves mounts and opens disks, notes and connections.

mod came;
mod exit_code;
mod mount_names;

mod initiatord;
mod known;
mod metrics;
pub mod mount_metrics;
mod mount_orders;
mod mount_table;
mod mount_top;
mod root_disk;
mod silent;
mod start_daemon;

use std::process::ExitCode;

use rblk_config::Exit;
use rblk_config::key_file::Side;
use rblk_operate::Output;
use rblk_operate::mount::disk_names::DiskNames;
use rblk_operate::mount::flags::{Cli, Command, DeadMount, KeyCommand};
use rblk_operate::mount::image;
use rblk_operate::mount::mount_status::MountStatus;
use rblk_operate::mount::not_there::{NotMounted, WhichMount};
use rblk_operate::mount::run_dir::{must_be_readable, names};

use crate::program::daemon::LentDescriptors;
use crate::program::shell_answers::answer_shell;
use crate::program::{command_line, key};
use exit_code::exit_of;
use initiatord::become_daemon;
use known::{KnownMounts, all_mounts, dead_mounts, must_be_known, status, users};
pub use mount_names::command;
use silent::Silent;

const PROGRAM: &str = "rblk-initiator";

/// The text below a new key: the steps that follow.
const NEXT: &str = "\
The key above is public. At the target, let this host in: `rblk-target host add NAME --key KEY --volume VOLUME:rw`.
Then give the key that `rblk-target key show` prints there to this host:
`rblk-initiator mount ADDRESS VOLUME --target-key KEY`, or target_keys = [\"KEY\"] in the file of the mount";

/// Carries out the command line of this process.
#[must_use]
pub fn main() -> ExitCode {
    if let Some(code) = answer_shell(command) {
        return code;
    }
    let parse = || Cli::of_process().map(|cli| (cli.command, cli.output));
    command_line::carry_out(PROGRAM, parse, carry_out, exit_of)
}

/// Carries out a command. The daemon opens disks and connections.
fn carry_out(command: Command, output: Output) -> anyhow::Result<Exit> {
    match command {
        Command::Mount(args) => start_daemon::mount(&args, output),
        Command::Vhost(args) => start_daemon::vhost(&args, output),
        Command::Recover(args) => start_daemon::recover(&args, output),
        Command::Upgrade { which, program } => {
            mount_orders::upgrade(which.name.as_deref(), program, output)
        }
        Command::Reload { which, target_key } => {
            mount_orders::reload(which.name.as_deref(), &target_key, output)
        }
        Command::List => list(output),
        Command::Metrics { write } => metrics::metrics(write.as_deref(), output),
        Command::Status { name } => show(&the_mount(name)?, output),
        Command::Top { interval, once } => mount_top::top(interval.0, once, output),
        Command::Key(KeyCommand::New(args)) => key::make(&args.file, NEXT, output),
        Command::Key(KeyCommand::Show(args)) => key::show(&args.file, Side::Initiator, output),
        Command::LookAt { disk, size_bytes, block_size } => {
            image::here(&disk, size_bytes, block_size).map(|()| Exit::Ok).map_err(Into::into)
        }
        Command::Udev { disk, sequence } => {
            if let Some(names) = DiskNames::find(&disk, sequence) {
                Output::Table.text(names)?;
            }
            Ok(Exit::Ok)
        }
        Command::Umount { .. } | Command::Doctor(_) => Err(become_daemon(LentDescriptors::All)),
        Command::Discover { .. }
        | Command::Leftovers { .. }
        | Command::LimitRequests(_)
        | Command::Users { .. }
        | Command::WriteBack { .. } => Err(become_daemon(LentDescriptors::Standard)),
    }
}

/// The name of the one mount of this host, unless another name is given.
fn the_mount(name: Option<String>) -> anyhow::Result<String> {
    if let Some(name) = name {
        return Ok(name);
    }
    must_be_readable()?;
    let mut names = names();
    match names.len() {
        1 => Ok(names.remove(0)),
        _ => Err(WhichMount(names).into()),
    }
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
            let line = dead_mounts(&[name.to_owned()], &mut dead_ones, false)?.0.pop();
            let Some(status) = dead_ones.pop() else {
                let gone = || anyhow::Error::from(NotMounted { what: name.to_owned() });
                return Err(line.map_or_else(gone, |line| DeadMount(line.line().to_owned()).into()));
            };
            line.iter().for_each(|line| output.aside(line.line()));
            status
        }
    };
    output.answer(&status, || {
        mount_table::mount(&status, users(std::slice::from_ref(&status), output))
    })?;
    Ok(Exit::Ok)
}

fn list(output: Output) -> anyhow::Result<Exit> {
    must_be_readable()?;
    let names = names();
    let KnownMounts { mounts, mut silent, disks } =
        all_mounts(&names, output == Output::Table, true)?;
    silent.extend(disks.into_iter().map(|disk| Silent::disk(disk.device, disk.line)));
    output.answer(&silent::entries(&mounts, &silent), || {
        mount_table::mounts(&mounts, users(&mounts, output))
    })?;
    let lost = |m: &MountStatus| m.lost().map(|lost| format!("{}: lost: {lost}", m.name));
    let fallback = |m: &MountStatus| m.fallback_line().map(|line| format!("{}: {line}", m.name));
    let hint = |m: &MountStatus| m.hint.as_ref().map(|hint| format!("{}: {hint}", m.name));
    let notes = mounts.iter().filter_map(MountStatus::outage);
    let notes = notes.chain(mounts.iter().filter_map(fallback));
    let path_lines = |m: &MountStatus| {
        m.path_lines().into_iter().map(|line| format!("{}: {line}", m.name)).collect::<Vec<_>>()
    };
    let notes = notes.chain(mounts.iter().flat_map(path_lines));
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
