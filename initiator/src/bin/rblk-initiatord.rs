//! The data side of the initiator: the process behind one mount, and `discover`. The only program
//! here that links libibverbs.
#![deny(clippy::print_stdout, clippy::print_stderr)]

use std::io::{Write, stderr};
use std::process::ExitCode;
use std::time::Duration;

use anyhow::Context;
use rblk_config::{ByteSize, Exit, MountConfig};
use rblk_fabric::{Address, ConnectOptions};
use rblk_initiator::commands::{doctor, umount};
use rblk_initiator::daemon::dead_mounts;
use rblk_initiator::daemon::flag_credentials::credentials;
use rblk_initiator::daemon::initiatord_exit::exit_of;
use rblk_initiator::daemon::mount_journal::{MountFields, MountJournal};
use rblk_initiator::daemon::probe::Wanted;
use rblk_initiator::mount::device::request_limit::limit_process;
use rblk_initiator::mount::device::write_back::IfUsed;
use rblk_initiator::mount::{Consent, GuestSocket, OnReady, ToldToEnd};
use rblk_initiator::volume::host_identity::host_identity;
use rblk_initiator::volume::session::Session;
use rblk_operate::config_flags::ConfigFlags;
use rblk_operate::config_flags::flag_sets::IdentityFlagSet;
use rblk_operate::journal::JournalFormat;
use rblk_operate::mount::flags::{
    CHECKED, Cli, Command, DoctorArgs, MountArgs, RecoverArgs, Report, VhostArgs,
};
use rblk_operate::mount::image;
use rblk_operate::mount::log_file::LogFile;
use rblk_operate::mount::mount_status::MountStatus;
use rblk_operate::{Log, LogWriter, Output, precautions, said_once, wants_colour};
use rblk_protocol::VolumeFlags;
use rblk_runtime::die_of_closed_pipes;
use serde::Serialize;
use tracing_subscriber::EnvFilter;

/// Requests to a disk wait while its server is dead, so the server is the last process to be
/// killed. The unit sets this value, too.
const OOM_SCORE: i16 = -1000;
/// Time to write the last lines of the log.
const LOG_PATIENCE: Duration = Duration::from_secs(1);

fn main() -> ExitCode {
    let cli = match Cli::of_process() {
        Ok(cli) => cli,
        Err(code) => return code,
    };
    let output = cli.output;
    let (log, writer) = Log::new();
    let mut lines = LogLines { log, journal: None, fields: MountFields::default(), output };
    let result = match cli.command {
        Command::Mount(args) => {
            lines.begin(writer, args.verbose);
            mount(&args, &mut lines)
        }
        Command::Vhost(args) => {
            lines.begin(writer, args.mount.verbose);
            vhost(&args, &mut lines)
        }
        Command::Recover(args) => {
            lines.begin(writer, args.verbose);
            recover(&args, &mut lines)
        }
        Command::Discover { address, timeout, identity } => {
            start_log(writer, 0, "error");
            die_of_closed_pipes();
            discover(&address, &identity, timeout.get(), output)
        }
        Command::Doctor(args) if args.probe => {
            start_log(writer, 0, "error");
            die_of_closed_pipes();
            probe(&args)
        }
        Command::LookAt { disk, size_bytes, block_size } => {
            let looked = image::here(&disk, size_bytes, block_size);
            return if looked.is_ok() { ExitCode::SUCCESS } else { ExitCode::FAILURE };
        }
        Command::LimitRequests(args) => return ExitCode::from(limit_process::here(&args)),
        Command::WriteBack { disk, unless_used, only_look } => {
            return write_back(&disk, unless_used, only_look);
        }
        Command::Umount { what, file_systems, force } => {
            die_of_closed_pipes();
            return answered(umount::umount(&what, file_systems, force, output), output);
        }
        Command::Doctor(args) => {
            die_of_closed_pipes();
            return answered(look_at_host(&args, output), output);
        }
        Command::Leftovers { names } => return told(&dead_mounts::left(names), output),
        Command::Users { disks } => return told(&dead_mounts::users(&disks), output),
        Command::List
        | Command::Metrics { .. }
        | Command::Status { .. }
        | Command::Top { .. }
        | Command::Upgrade { .. }
        | Command::Reload { .. }
        | Command::Udev { .. }
        | Command::Key(_) => {
            let text = "only `mount`, `vhost`, `recover NAME` and `discover`; use rblk-initiator for everything else";
            return output.end("rblk-initiatord", Exit::Usage, Some(text));
        }
    };
    lines.end();
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            output.end("rblk-initiator", exit_of(&error), Some(&said_once(error.as_ref())))
        }
    }
}

/// Writes the page cache of a disk back, for the process of a mount.
fn write_back(disk: &str, unless_used: bool, only_look: bool) -> ExitCode {
    let if_used = match (unless_used, only_look) {
        (false, _) => IfUsed::Sync,
        (true, false) => IfUsed::Refuse,
        (true, true) => IfUsed::OnlyLook,
    };
    ExitCode::from(rblk_initiator::mount::device::write_back::here(disk, if_used))
}

/// The end of a command of `rblk-initiator` that this program carried out.
fn answered(result: anyhow::Result<Exit>, output: Output) -> ExitCode {
    match result {
        Ok(exit) => output.end("rblk-initiator", exit, None),
        Err(error) => {
            output.end("rblk-initiator", exit_of(&error), Some(&said_once(error.as_ref())))
        }
    }
}

/// Prints the answer for the command that asks, in one line.
fn told(found: &impl Serialize, output: Output) -> ExitCode {
    let told = Output::Json.item(found, String::new);
    answered(told.map(|()| Exit::Ok).map_err(Into::into), output)
}

fn look_at_host(args: &DoctorArgs, output: Output) -> anyhow::Result<Exit> {
    let report = doctor::doctor(args, &std::env::current_exe()?)?;
    output.answer(&report, || report.to_string())?;
    Ok(report.exit())
}

/// The lines of the log and their output: the journal if it reads the standard error, or the file
/// of the mount, or the standard error.
struct LogLines {
    log: Log,
    // `None` once the thread of the log has it.
    journal: Option<MountJournal>,
    fields: MountFields,
    // The form of the command's output.
    output: Output,
}

impl LogLines {
    /// Starts the log. No line was written before.
    fn begin(&mut self, writer: LogWriter, verbose: u8) {
        self.journal = MountJournal::of_stderr(self.fields.clone());
        if self.journal.is_none() {
            return start_log(writer, verbose, "info");
        }
        tracing_subscriber::fmt()
            .with_env_filter(filter(verbose, "info"))
            .log_internal_errors(false)
            .event_format(JournalFormat { program: "rblk-initiator" })
            .with_writer(move || writer.clone())
            .init();
    }

    /// Starts the thread that writes the lines, with the namespaces and rights of the caller.
    fn start(&mut self) -> std::io::Result<()> {
        match (self.journal.take(), LogFile::of_stderr()) {
            (Some(journal), _) => self.log.start(journal),
            (None, Some(file)) => self.log.start(file),
            (None, None) => self.log.start(stderr()),
        }
    }

    /// Waits until every line is written.
    fn end(&mut self) {
        match self.journal.take() {
            Some(journal) => self.log.end(LOG_PATIENCE, journal),
            None => self.log.end(LOG_PATIENCE, stderr()),
        }
    }
}

fn filter(verbose: u8, quiet: &str) -> EnvFilter {
    let level = match verbose {
        0 => quiet,
        1 => "debug",
        _ => "trace",
    };
    EnvFilter::try_from_env("RBLK_LOG").unwrap_or_else(|_| EnvFilter::new(level))
}

fn start_log(writer: LogWriter, verbose: u8, quiet: &str) {
    tracing_subscriber::fmt()
        .with_env_filter(filter(verbose, quiet))
        .with_writer(move || writer.clone())
        .with_target(false)
        // Otherwise it reports on stderr that writing to stderr failed, and panics: a terminal may
        // close.
        .log_internal_errors(false)
        .with_ansi(wants_colour(&stderr()))
        .init();
}

fn mount(args: &MountArgs, lines: &mut LogLines) -> anyhow::Result<()> {
    serve(args.foreground, lines, async |lines, on_ready| {
        let configured = args.configured()?;
        let config = &configured.config;
        let name = args.mount_name(config)?;
        lines.fields.named(&name);
        lines.fields.of_volume(&config.volume);
        warn_of_file(args);
        prepare_process(lines)?;
        let host = host_identity(config.host_name.as_deref())?;
        let consent = Consent { take_over: args.take_over, any_kernel: args.any_kernel };
        rblk_initiator::mount::run(&configured, &name, host, consent, on_ready).await
    })
}

/// Logs the warnings of the configuration file.
fn warn_of_file(args: &MountArgs) {
    for warning in args.config.as_deref().map(MountConfig::warnings).unwrap_or_default() {
        tracing::warn!("{warning}");
    }
}

fn vhost(args: &VhostArgs, lines: &mut LogLines) -> anyhow::Result<()> {
    serve(args.mount.foreground, lines, async |lines, on_ready| {
        let configured = args.configured()?;
        let config = &configured.config;
        let name = args.mount.mount_name(config)?;
        lines.fields.named(&name);
        lines.fields.of_volume(&config.volume);
        warn_of_file(&args.mount);
        let socket = GuestSocket::bind(&args.socket)?.with_memory_max(args.memory_max);
        prepare_for_guest(lines)?;
        let host = host_identity(config.host_name.as_deref())?;
        let take_over = args.mount.take_over;
        rblk_initiator::mount::run_guest(&configured, &name, socket, host, take_over, on_ready)
            .await
    })
}

fn recover(args: &RecoverArgs, lines: &mut LogLines) -> anyhow::Result<()> {
    let Some(name) = &args.which.name else {
        anyhow::bail!("rblk-initiatord serves one mount: name it");
    };
    rblk_protocol::Name::new(name).with_context(|| format!("the name {name}"))?;
    if args.check {
        rblk_initiator::mount::check(name)?;
        // The command that asks recognises the program by this.
        return Ok(Output::Table.text(format_args!("{CHECKED}{}", env!("CARGO_PKG_VERSION")))?);
    }
    serve(args.foreground, lines, async |lines, on_ready| {
        lines.fields.named(name);
        prepare_process(lines)?;
        rblk_initiator::mount::recover(name, args.lock_on_stdin, on_ready).await
    })
}

/// Serves a mount to its end, and reports the result of its start.
fn serve(
    foreground: bool,
    lines: &mut LogLines,
    mount: impl AsyncFnOnce(&mut LogLines, OnReady<'_>) -> anyhow::Result<()>,
) -> anyhow::Result<()> {
    if !foreground {
        // A hang-up of the terminal does not reach another session. A leader of a process group
        // cannot leave its session: then a shell has started this program itself.
        let _ = nix::unistd::setsid();
    }
    let mut reported = false;
    let (fields, output) = (lines.fields.clone(), lines.output);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let result = runtime.block_on(mount(lines, &mut |status| {
        reported = true;
        fields.ready(status);
        tell_of_image(status.clone());
        report(foreground, &Report::Mounted(Box::new(status.clone())), output);
    }));
    runtime.shutdown_timeout(Duration::from_secs(1));
    if let Err(error) = &result
        && !reported
    {
        report(
            foreground,
            &Report::Failed { error: said_once(error.as_ref()), exit: exit_of(error).code() },
            output,
        );
    }
    match result {
        // A stopped service has not failed.
        Err(error) if foreground && error.is::<ToldToEnd>() => Ok(()),
        result => result,
    }
}

/// Logs a contradiction between the image of a mount and its block size. Nothing waits for that.
fn tell_of_image(status: MountStatus) {
    let look = move || {
        if let Some(found) = image::elsewhere(&status) {
            tracing::warn!(device = status.device, "{found}");
        }
    };
    // Without a thread, the contradiction is not logged.
    let _ = std::thread::Builder::new().name("image".to_owned()).spawn(look);
}

/// Prints one line for the waiting command, and closes the pipe, so that the command can end.
fn report(foreground: bool, report: &Report, output: Output) {
    if foreground {
        if let Report::Mounted(status) = report {
            // The mount goes on without a reader.
            let _ = output.item(status, || status.device.clone());
        }
        return;
    }
    if let Ok(mut line) = serde_json::to_vec(report) {
        line.push(b'\n');
        let mut out = std::io::stdout().lock();
        // The command may have been killed meanwhile; the mount goes on.
        let _ = out.write_all(&line).and_then(|()| out.flush());
    }
    if let Ok(null) = std::fs::OpenOptions::new().write(true).open("/dev/null") {
        let _ = nix::unistd::dup2_stdout(null);
    }
}

/// Prepares this process to serve a block device. The process needs a mount namespace of its own:
/// otherwise its exit can wait for a file system on its own device. Its allocations must not wait
/// for writeback, and its pages must not be swapped to the device. Then the process drops the
/// rights that it does not need any more. It has one thread.
fn prepare_process(lines: &mut LogLines) -> anyhow::Result<()> {
    use nix::sched::{CloneFlags, unshare};
    if !nix::unistd::geteuid().is_root() {
        return Err(rblk_operate::mount::not_there::NotRoot.into());
    }
    raise_limits();
    precautions::take(OOM_SCORE);
    unshare(CloneFlags::CLONE_NEWNS).context("a mount namespace of our own")?;
    // Mounts of other namespaces still appear here. Mounts made here (there are none) do not appear
    // there.
    nix::mount::mount(
        None::<&str>,
        "/",
        None::<&str>,
        nix::mount::MsFlags::MS_REC | nix::mount::MsFlags::MS_SLAVE,
        None::<&str>,
    )
    .context("making the mount namespace a slave")?;
    rblk_initiator::mount::device::namespace::detach_ublk();
    rblk_initiator::front::ublk::become_io_flusher();
    rblk_initiator::front::ublk::stay_in_memory();
    settle_process(lines)
}

/// Prepares this process to serve the disk of a guest. No file system of this host is on it. A user
/// other than root keeps the present limits.
fn prepare_for_guest(lines: &mut LogLines) -> anyhow::Result<()> {
    raise_limits();
    precautions::take(OOM_SCORE);
    settle_process(lines)
}

fn raise_limits() {
    use nix::sys::resource::{Resource, getrlimit, setrlimit};
    for resource in [Resource::RLIMIT_MEMLOCK, Resource::RLIMIT_NOFILE] {
        if let Ok((soft, hard)) = getrlimit(resource)
            && soft < hard
        {
            let _ = setrlimit(resource, hard, hard);
        }
    }
}

/// Drops unneeded privileges, and starts the log.
fn settle_process(lines: &mut LogLines) -> anyhow::Result<()> {
    // Not earlier, as --config may be relative. A directory in use cannot be unmounted.
    std::env::set_current_dir("/").context("the directory /")?;
    load_tls();
    rblk_initiator::daemon::privileges::drop_what_is_not_needed()
        .context("giving up capabilities")?;
    // A thread inherits all of this.
    lines.start().context("a thread for the log")
}

/// Makes the kernel load its TLS (module `tls`): it does so only for a process with `CAP_NET_ADMIN`
/// (`__tcp_ulp_find_autoload`). An unconnected socket does not get TLS.
fn load_tls() {
    use nix::sys::socket::{AddressFamily, SockFlag, SockType, setsockopt, socket, sockopt};
    let stream = (AddressFamily::Inet, SockType::Stream, SockFlag::SOCK_CLOEXEC);
    if let Ok(socket) = socket(stream.0, stream.1, stream.2, None) {
        let result = setsockopt(&socket, sockopt::TcpUlp::default(), b"tls");
        tracing::debug!(?result, "TLS of the kernel: ENOTCONN says that it is there");
    }
}

/// Tries a target for `rblk-initiator doctor`, which reads the one printed line.
fn probe(args: &DoctorArgs) -> anyhow::Result<()> {
    let [address] = args.address.as_slice() else { anyhow::bail!("--probe needs one address") };
    let credentials = credentials(args.keys.layer())?;
    let encrypt = args.keys.over(&MountConfig::default())?.transport.encrypt;
    let wanted = Wanted { volume: args.read.clone(), bytes: args.read_bytes };
    let found = rblk_initiator::daemon::probe::probe(
        &address.parse()?,
        credentials,
        encrypt,
        &wanted,
        args.timeout.get(),
    )?;
    Ok(Output::Json.item(&found, String::new)?)
}

#[derive(Serialize)]
struct Discovered {
    target: String,
    address: String,
    device: String,
    transport: String,
    volumes: Vec<DiscoveredVolume>,
}

#[derive(Serialize)]
struct DiscoveredVolume {
    name: String,
    size_bytes: u64,
    block_size: u32,
    read_only: bool,
    in_use: bool,
    ephemeral: bool,
}

fn discover(
    address: &str,
    identity: &ConfigFlags<IdentityFlagSet>,
    timeout: Duration,
    output: Output,
) -> anyhow::Result<()> {
    let address: Address = address.parse()?;
    let credentials = credentials(identity.layer())?;
    let options = ConnectOptions { timeout, ..ConnectOptions::default() };
    let host = host_identity(None)?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let found = runtime.block_on(async {
        let mut session =
            Session::connect(&address, &options, &host, credentials.as_ref(), None).await?;
        let volumes = session.list().await?;
        let caps = session.device().caps().clone();
        let target = session.login().target_name.to_string();
        session.logout(Duration::from_secs(1)).await;
        let volumes = volumes
            .iter()
            .map(|v| DiscoveredVolume {
                name: v.name.to_string(),
                size_bytes: v.blocks.bytes(v.block_size).unwrap_or(0),
                block_size: v.block_size.bytes(),
                read_only: v.flags.has(VolumeFlags::READ_ONLY),
                in_use: v.flags.has(VolumeFlags::IN_USE),
                ephemeral: v.flags.has(VolumeFlags::EPHEMERAL),
            })
            .collect();
        anyhow::Ok(Discovered {
            target,
            address: address.to_string(),
            device: caps.name,
            transport: caps.transport.to_string(),
            volumes,
        })
    })?;
    runtime.shutdown_timeout(Duration::from_secs(1));
    Ok(output.answer(&found, || discovered(&found))?)
}

/// The volumes of a target, for people.
fn discovered(found: &Discovered) -> String {
    let mut text = format!(
        "target {} at {} ({} over {})\n",
        found.target, found.address, found.transport, found.device
    );
    text += &format!(
        "{:<24} {:>10} {:>6} {:<5} {:<7} NOTE\n",
        "VOLUME", "SIZE", "BLOCK", "MODE", "IN USE"
    );
    for v in &found.volumes {
        text += &format!(
            "{:<24} {:>10} {:>6} {:<5} {:<7} {}\n",
            v.name,
            ByteSize(v.size_bytes).to_string(),
            v.block_size,
            if v.read_only { "ro" } else { "rw" },
            if v.in_use { "yes" } else { "no" },
            if v.ephemeral { "lost when the target ends" } else { "" }
        );
    }
    text
}
