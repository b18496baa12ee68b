//! Builds a target from its configuration, runs it, and takes it apart: the only module that knows
//! all parts.
//!
//! Order of the start: limits, control socket, listeners bound, stores, memory, poll groups,
//! devices, ready. Only then the target takes connections, after everything that can fail. The end
//! is the reverse, and each step waits for the one before.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::Context;
use nix::sys::resource::{Resource, getrlimit};
use rblk_config::{Auth, Encrypt, Spin, TargetConfig, VolumeConfig};
use rblk_fabric::soft::tls::kernel_has_tls;
use rblk_fabric::{
    Address, Device, FabricError, ListenOptions, Listener, PageKind, Region, Scheme,
};
use rblk_operate::said_once;
use rblk_protocol::width::wide;
use rblk_protocol::{InstanceId, Name};
use rblk_runtime::spin::SpinMode;
use tokio::sync::{mpsc, watch};
use tokio::task::JoinHandle;

use crate::cache::{Shard, ShardOptions};
use crate::control::connect::devices::may_serve;
use crate::control::connect::registration::busy;
use crate::control::core::{AuthConfig, Capacity, Hosts};
use crate::control::ends::RunEnd;
use crate::control::hand_over::{
    Checked, HandOver, Inherited, Successor, name_of_control, name_of_http,
};
use crate::control::observe::outages::Outages;
use crate::control::requests::control_socket::{ControlSocket, SocketFile};
use crate::control::requests::departure::Departure;
use crate::control::requests::reread::Reread;
use crate::control::{ConnectionLimits, Control, ControlParts, ToControl};
use crate::daemon::accept::{Missing, accept};
use crate::daemon::addresses::addresses;
use crate::daemon::hang_up::reload;
use crate::daemon::http::{Ending, Farewell, Http};
use crate::daemon::process_signals::{RELOADS, Signals, StopOrdered, Stops};
use crate::data::poll_group::group_thread::{GroupHandle, Tuning};
use crate::data::poll_group::other_groups::OtherGroups;
use crate::data::poll_group::{FromGroup, group_thread};
use crate::memory::arena::Arena;
use crate::memory::demand;
use crate::memory::demand::{Demand, HostMemory};
use crate::pool::opening::{AwayVolume, OpenedVolume, group_users, open_right_ones};
use crate::record::StateDirectory;
use crate::store::rbd::fencing::fence_rights::require_fencing;
use crate::store::rbd::{CLOSE_WAIT, wait_until_closed};
use crate::store::uring::{UringOptions, UringStore};
use crate::store::{Backing, StoreError};
use rblk_operate::target::defaults::{NO_HOST, NO_VOLUME, poll_groups, target_name};
use rblk_operate::target::status::GivenUp;
use rblk_operate::target::status::in_words;

/// How long clusters may take to say whether a user may fence, before an upgrade. The running
/// program waits for 10 s for all of the check.
const FENCING_CHECK: Duration = Duration::from_secs(5);
/// How long to wait for an address that this host does not have yet, for example while it boots.
const ADDRESS_WAIT: Duration = Duration::from_secs(5);
/// Step of that wait.
const ADDRESS_STEP: Duration = Duration::from_millis(200);
/// How long the memory of the program before may take to come back, and the step of that wait.
const ROOM_WAIT: Duration = Duration::from_secs(3);
const ROOM_STEP: Duration = Duration::from_millis(50);
/// How long tasks with sockets may take to end.
const TASKS_WAIT: Duration = Duration::from_secs(1);

/// Volumes that can be added to a running target, if the limit on open files allows as many.
const PLACES_MORE: usize = 1024;

fn spin_mode(spin: Spin) -> SpinMode {
    match spin {
        Spin::Adaptive => SpinMode::ADAPTIVE,
        Spin::Always => SpinMode::Always,
        Spin::For(time) => SpinMode::Fixed(time.into()),
    }
}

/// Serves until SIGTERM or SIGINT, drains, and returns. SIGHUP reloads the configuration. The
/// caller holds these signals ([`hold`](crate::daemon::process_signals::hold)). `reread` reads the
/// configuration again, for a reload. `has_file`: it is not of flags alone. `inherited`: the
/// inheritance from the program that this one took over from; taken when this one is ready.
///
/// Returns the program that takes the place of this one, if one does. The configuration is
/// [`Inherited::configuration`], if there is one.
///
/// # Errors
/// Anything that keeps the target from starting, a poll group that broke, or acknowledged data that
/// was given up at the end.
pub fn serve(
    config: &TargetConfig,
    has_file: bool,
    inherited: &mut Option<Inherited>,
    reread: impl Fn() -> anyhow::Result<TargetConfig> + Send + Sync + 'static,
) -> anyhow::Result<Option<Successor>> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let stop = StopOrdered::default();
    let result = runtime.block_on(async {
        let name = name_after(config, inherited.as_ref())?;
        let reread = Reread::new(config, (name, has_file), reread);
        let stops = Stops::noted_in(stop.clone()).context("SIGTERM")?;
        run(config, reread, inherited, stops).await
    });
    // Tasks that still hold sockets must not outlive their files.
    runtime.shutdown_timeout(TASKS_WAIT);
    // The next program, or another target, gets the locks of images at once.
    if !wait_until_closed(CLOSE_WAIT) {
        tracing::error!(
            within = ?CLOSE_WAIT,
            "a Ceph cluster does not answer, so an image was not closed: its lock ends when the cluster misses this \
             client (30 s)"
        );
    }
    let Some((successor, file)) = result? else { return Ok(None) };
    // No task reads signals any more: later ones wait for the next program.
    if stop.is_set() {
        tracing::info!("the target stops, and no other program takes its place");
        return Ok(None);
    }
    file.stay();
    Ok(Some(successor))
}

/// The name of a target that may have taken over: then it does not follow the name of the host.
fn name_after(config: &TargetConfig, inherited: Option<&Inherited>) -> anyhow::Result<Name> {
    match inherited.and_then(Inherited::target_name) {
        Some(name) if config.name.is_none() => Ok(Name::new(name)?),
        _ => target_name(config),
    }
}

/// The report of a program that is asked whether it could take over: it could start with this
/// configuration, as far as that can be seen while another one runs.
///
/// # Errors
/// Why it could not.
pub fn check_take_over(config: &TargetConfig) -> anyhow::Result<Checked> {
    let addresses = addresses(config)?;
    check_encryption(config, &addresses)?;
    auth_of(config)?;
    require_fencing(group_users(config), FENCING_CHECK).map_err(StoreError::from)?;
    let listen = addresses.iter().map(ToString::to_string).collect();
    let name = target_name(config)?.to_string();
    let demand = Demand::of(config, poll_groups(config));
    Ok(Checked::of_this_program(config, (name, listen), demand))
}

async fn run(
    config: &TargetConfig,
    reread: Arc<Reread>,
    inherited: &mut Option<Inherited>,
    stops: Stops,
) -> anyhow::Result<Option<(Successor, SocketFile)>> {
    let hang_ups = Signals::of(&RELOADS).context("SIGHUP")?;
    let (before, name) = (inherited.as_ref(), reread.target());
    let addresses = addresses(config)?;
    check_encryption(config, &addresses)?;
    warn_of_access(config);
    let auth = auth_of(config)?;
    raise_limits(config);
    let demand = Demand::of(config, poll_groups(config));
    check_room(&demand, before).await?;
    let mut socket = control_socket(config, before).await?;
    let http = http_of(config, before).await?;
    let listen = listen_options(config);
    let (listeners, missing) = bind_all(&addresses, &listen, before).await?;
    let listening = listening(&addresses, &listeners, &missing);
    let devices = devices_of(&listeners, &demand, config.devices.as_deref())?;
    // No store is open yet, and the memory of a large arena takes time.
    if stops.has_come() {
        socket.keep();
        return Ok(stopped_early());
    }
    let (opened, away, state) = open_what_is_served(config, &name, before)?;
    let others = configured(config, &away);
    let config = &without(config, &away);
    let stores = local_stores(&opened);
    let outages = Outages::default();
    let plan = RunPlan {
        config,
        name,
        auth,
        listening: listening.clone(),
        outages: outages.clone(),
        away,
        others,
        demand: &demand,
        took_over: before.map(|before| before.note().clone()),
    };
    let (control, from_groups) = plan.build(state, opened, devices)?;
    let (request_sender, requests) = mpsc::channel(64);
    let (incoming, accepting) = accept(listeners, missing, &listen, &outages);
    tokio::spawn(reload(hang_ups, request_sender.clone(), Arc::clone(&reread)));
    // From here on this program cannot go back to the one before.
    stores.into_iter().for_each(|backing| backing.keep());
    socket.keep();
    *inherited = None;
    let socket = tokio::spawn(socket.serve(request_sender.clone(), reread));
    let pages = Pages::serve(http, &request_sender);
    tokio::spawn(drain_at(stops, request_sender));
    tracing::info!(?listening, poll_groups = poll_groups(config), "ready");
    let _ = sd_notify::notify(&[sd_notify::NotifyState::Ready]);
    let begun = Instant::now();
    let result = control.run(incoming, from_groups, requests).await;
    let http = pages.end(farewell(&result)).await?;
    tracing::info!(served_for = ?begun.elapsed(), "stopped");
    let RunEnd { clean, given_up, departure, .. } = result?;
    let Some(Departure { program, note, leaves }) = departure else {
        return if given_up.is_empty() { Ok(None) } else { Err(GivenUp(given_up).into()) };
    };
    let mut sockets = accepting.sockets().await;
    let (control, file) = socket.await?;
    sockets.extend(control.map(|socket| (name_of_control(&config.control_socket), socket)));
    sockets.extend(config.http.zip(http).map(|(address, socket)| (name_of_http(address), socket)));
    let note = HandOver { clean, ..note };
    Ok(Some((Successor::new(program, note, leaves, sockets), file)))
}

/// A stop that came before the target was ready: no successor.
fn stopped_early() -> Option<(Successor, SocketFile)> {
    tracing::info!("a stop was ordered before the target was ready");
    None
}

/// The configuration of the volumes that are away.
fn configured(config: &TargetConfig, away: &[AwayVolume]) -> Vec<VolumeConfig> {
    let is_away = |volume: &&VolumeConfig| away.iter().any(|away| away.name == volume.name);
    config.volumes.iter().filter(is_away).cloned().collect()
}

/// The files and devices of the open volumes.
fn local_stores(opened: &[OpenedVolume]) -> Vec<Arc<Backing>> {
    opened.iter().filter_map(|opened| opened.backing.as_ref()?.local().cloned()).collect()
}

/// The HTTP server, if there is one.
struct Pages {
    server: Option<JoinHandle<Option<OwnedFd>>>,
    last_word: watch::Sender<Option<Farewell>>,
}

impl Pages {
    fn serve(http: Option<Http>, requests: &mpsc::Sender<ToControl>) -> Self {
        let (last_word, word) = watch::channel(None);
        let serve = |http: Http| tokio::spawn(http.serve(requests.clone(), word));
        Self { server: http.map(serve), last_word }
    }

    /// Sends the end of the target to open pages, and waits until they have it. Returns the socket.
    async fn end(self, farewell: Farewell) -> anyhow::Result<Option<OwnedFd>> {
        let _ = self.last_word.send(Some(farewell));
        match self.server {
            Some(server) => Ok(server.await?),
            None => Ok(None),
        }
    }
}

/// The last word on a run, for open pages.
fn farewell(result: &anyhow::Result<RunEnd>) -> Farewell {
    let (end, text) = match result {
        Err(error) => (Ending::Failed, format!("it failed: {}", said_once(error.as_ref()))),
        Ok(RunEnd { departure: Some(_), .. }) => {
            (Ending::Upgraded, "another program takes its place".to_owned())
        }
        Ok(RunEnd { given_up, .. }) if !given_up.is_empty() => {
            (Ending::Stopped, format!("acknowledged data is lost: {}", in_words(given_up)))
        }
        Ok(RunEnd { stayed: 0, .. }) => (
            Ending::Drained,
            "every initiator had left, and everything is in the stores".to_owned(),
        ),
        Ok(RunEnd { stayed, .. }) => {
            (Ending::Stopped, format!("sessions that had not left in time: {stayed}"))
        }
    };
    Farewell { end, text }
}

/// The volumes of a configuration, those of them that are left away, and the directory of their
/// records. Goes on with the inheritance from the program before.
fn open_what_is_served(
    config: &TargetConfig,
    name: &Name,
    before: Option<&Inherited>,
) -> anyhow::Result<(Vec<OpenedVolume>, Vec<AwayVolume>, StateDirectory)> {
    let left = before.map(Inherited::stores).transpose().map_err(anyhow::Error::msg)?;
    let (opened, away) = open_right_ones(config, name, left)?;
    let records = before.map_or(&[][..], Inherited::records);
    let state = state_of(config, name, &opened)?.with_left(records).map_err(anyhow::Error::msg)?;
    Ok((opened, away, state))
}

/// The resources for the connections of all hosts. A resource of unknown size has no bound.
fn capacity(config: &TargetConfig) -> Capacity {
    let files = getrlimit(Resource::RLIMIT_NOFILE).ok().map(|(limit, _)| limit);
    let files = files.and_then(|limit| demand::files_for_connections(config, limit));
    let memory_bytes = HostMemory::read().bytes().unwrap_or(u64::MAX);
    Capacity::new(config.sessions_max, files, memory_bytes)
}

/// The running configuration of a target that leaves volumes away: a reload adds them again when
/// they are mended.
fn without(config: &TargetConfig, away: &[AwayVolume]) -> TargetConfig {
    let mut config = config.clone();
    config.volumes.retain(|volume| !away.iter().any(|away| away.name == volume.name));
    config
}

/// Raises the limits of this process, and logs if fewer files may be open than all sessions could
/// take. Control warns when they come near.
fn raise_limits(config: &TargetConfig) {
    demand::raise_limits();
    if let Ok((limit, _)) = getrlimit(Resource::RLIMIT_NOFILE)
        && let Some(warning) = demand::too_few_files(config, limit)
    {
        tracing::info!("{warning}");
    }
}

/// The parts of a run when its stores are open.
struct RunPlan<'c> {
    config: &'c TargetConfig,
    name: Name,
    auth: Option<AuthConfig>,
    listening: Vec<String>,
    outages: Outages,
    away: Vec<AwayVolume>,
    others: Vec<VolumeConfig>,
    demand: &'c Demand,
    took_over: Option<HandOver>,
}

impl RunPlan<'_> {
    /// Builds memory, poll groups, control and devices, and writes the records for the next run.
    fn build(
        self,
        state: StateDirectory,
        opened: Vec<OpenedVolume>,
        devices: Vec<Device>,
    ) -> anyhow::Result<(Control, mpsc::UnboundedReceiver<FromGroup>)> {
        let Self { config, name, auth, listening, outages, away, others, demand, took_over } = self;
        let arena = demand.allocate(&HostMemory::read())?;
        let (to_control, from_groups) = mpsc::unbounded_channel();
        let share = usize::try_from(demand.share())?;
        let groups = poll_groups(config);
        let handles = start_poll_groups(config, groups, share, &arena, &opened, &to_control)?;
        drop(to_control);
        let mut control = Control::new(ControlParts {
            listening,
            outages,
            away,
            others,
            auth,
            took_over,
            ..parts(config, name, state, handles, arena, opened)?
        })?;
        // Registering a large arena takes seconds, so it is done before the first connection. Only
        // control keeps the devices, so that an unplugged one can be dropped.
        for device in devices {
            control.serve_by(&device).with_context(|| format!("device {}", device.caps().name))?;
        }
        // Nothing can fail from here on.
        control.begin();
        Ok((control, from_groups))
    }
}

/// Whether the host has the memory. The memory of the program before this one may come back a
/// little late: the kernel takes its rings apart in the background.
async fn check_room(demand: &Demand, before: Option<&Inherited>) -> anyhow::Result<()> {
    let deadline = Instant::now() + if before.is_some() { ROOM_WAIT } else { Duration::ZERO };
    loop {
        match demand.check(&HostMemory::read()) {
            Err(_) if Instant::now() < deadline => tokio::time::sleep(ROOM_STEP).await,
            // The program before had the memory a moment ago, and no other one can serve in its
            // stead.
            Err(error) if before.is_some_and(Inherited::is_back) => {
                tracing::warn!(%error, "trying all the same");
                return Ok(());
            }
            result => return Ok(result?),
        }
    }
}

/// Warns in the log that other hosts may do everything, or that no host may do anything, or that no
/// volume is served.
fn warn_of_access(config: &TargetConfig) {
    if let Some(address) = exposed_to_all(config) {
        tracing::warn!(
            address,
            "insecure: any host that reaches this address can read, write and take over every volume"
        );
    }
    if config.authentication() == Auth::Required && config.hosts.is_empty() {
        tracing::warn!("{NO_HOST}");
    }
    if config.volumes.is_empty() {
        tracing::warn!("{NO_VOLUME}");
    }
}

/// The first address that other hosts reach, if no proof is required.
fn exposed_to_all(config: &TargetConfig) -> Option<&str> {
    config.exposed().filter(|_| config.authentication() == Auth::None)
}

/// Whether the kernel can encrypt all that the configuration wants encrypted.
fn check_encryption(config: &TargetConfig, addresses: &[Address]) -> anyhow::Result<()> {
    let over_tcp = addresses.iter().find(|address| address.scheme == Scheme::Tcp);
    match over_tcp {
        Some(address) if config.transport.encrypt == Encrypt::Required => kernel_has_tls()
            .with_context(|| format!("cannot encrypt {address} (encrypt = \"required\")")),
        _ => Ok(()),
    }
}

/// The control socket: the one that the program before left, if it did.
async fn control_socket(
    config: &TargetConfig,
    before: Option<&Inherited>,
) -> anyhow::Result<ControlSocket> {
    let path = &config.control_socket;
    let left = before.and_then(|before| before.control(path));
    if let Some(socket) = left.and_then(|left| ControlSocket::go_on(left, path)) {
        return Ok(socket);
    }
    ControlSocket::bind(path).await.with_context(|| {
        format!("control socket {} (choose another with --control-socket)", path.display())
    })
}

/// The server of metrics and the live page, if the configuration has an address for it.
async fn http_of(
    config: &TargetConfig,
    before: Option<&Inherited>,
) -> anyhow::Result<Option<Http>> {
    let Some(address) = config.http else { return Ok(None) };
    if !address.ip().is_loopback() {
        tracing::warn!(
            %address,
            "http: any host that reaches this address can read the names of volumes and hosts, their addresses and \
             their counters; none can change anything"
        );
    }
    let http = match before.and_then(|before| before.http(address)) {
        Some(left) => Http::go_on(left),
        None => Http::bind(address).await,
    };
    http.map(Some)
        .with_context(|| format!("http = \"{address}\" (another program may use the port)"))
}

/// Listens at every address, by the sockets that the program before left, if any. A program that is
/// back after a failed take-over serves without an address where it cannot listen, and listens
/// there when it can.
async fn bind_all(
    addresses: &[Address],
    options: &ListenOptions,
    before: Option<&Inherited>,
) -> anyhow::Result<(Vec<Listener>, Vec<Missing>)> {
    let (mut listeners, mut missing) = (Vec::new(), Vec::new());
    for address in addresses {
        let socket = before.and_then(|before| before.listener(&address.to_string()));
        let listener = match socket {
            Some(socket) => Listener::go_on(socket, address, options),
            None => bind(address, options).await,
        };
        match listener {
            Ok(listener) => listeners.push(listener),
            Err(error) if before.is_some_and(Inherited::is_back) => {
                tracing::error!(%address, %error, "cannot listen there now: trying again and again");
                missing.push((address.clone(), error));
            }
            Err(error) => return Err(error.into()),
        }
    }
    Ok((listeners, missing))
}

/// The addresses that it listens on, or tries to, for people: in the order of the configuration.
fn listening(addresses: &[Address], listeners: &[Listener], missing: &[Missing]) -> Vec<String> {
    let mut bound = listeners.iter();
    let is_missing = |address: &Address| missing.iter().any(|(its, _)| its == address);
    let named = |address: &Address| match is_missing(address) {
        true => Some(address.to_string()),
        false => bound.next().map(|listener| listener.address().to_string()),
    };
    addresses.iter().filter_map(named).collect()
}

/// The options of every listener.
fn listen_options(config: &TargetConfig) -> ListenOptions {
    ListenOptions { tos: config.transport.tos, busy: busy() }
}

async fn bind(address: &Address, options: &ListenOptions) -> Result<Listener, FabricError> {
    let begun = Instant::now();
    let mut said = false;
    loop {
        match Listener::bind_with(address, options).await {
            // At boot the interface may not have its address yet.
            Err(FabricError::Listen { error, .. })
                if error.kind() == std::io::ErrorKind::AddrNotAvailable
                    && begun.elapsed() < ADDRESS_WAIT =>
            {
                if !said {
                    tracing::info!(%address, within = ?ADDRESS_WAIT, "waiting for the address: this host does not have it yet");
                }
                said = true;
                tokio::time::sleep(ADDRESS_STEP).await;
            }
            result => return result,
        }
    }
}

/// The devices that must register the memory at the start: those of addresses on one device, and
/// the only one of a listener on every address. If peers may come by several devices, each
/// registers the memory when the first connection comes by it.
fn devices_of(
    listeners: &[Listener],
    demand: &Demand,
    allowed: Option<&[String]>,
) -> anyhow::Result<Vec<Device>> {
    let mut devices = Vec::new();
    for listener in listeners {
        let (mut found, address) = (listener.devices()?, listener.address());
        if listener.is_everywhere() {
            found.retain(|device| may_serve(allowed, device));
            if found.len() != 1 {
                let names = found.iter().map(|device| device.caps().name.clone());
                let names = names.collect::<Vec<_>>().join(", ");
                tracing::info!(%address, names, "devices are prepared at their first connection");
                continue;
            }
        }
        if let Some(device) = found.iter().find(|device| !may_serve(allowed, device)) {
            let name = &device.caps().name;
            anyhow::bail!("{address} is an address of {name}, which `devices` does not name");
        }
        for device in &found {
            demand.registers_with(device.caps())?;
        }
        devices.extend(found);
    }
    Ok(devices)
}

/// The directory with the records of an earlier run. Call it when the stores are locked: then the
/// earlier run has ended.
fn state_of(
    config: &TargetConfig,
    name: &Name,
    opened: &[OpenedVolume],
) -> anyhow::Result<StateDirectory> {
    // A target without volumes may get some while it runs.
    match opened.is_empty() || opened.iter().any(|opened| opened.backing.is_some()) {
        true => StateDirectory::open(&config.state_dir, name),
        false => Ok(StateDirectory::nothing()),
    }
}

/// Starts every poll group over its share of the arena, with every volume.
fn start_poll_groups(
    config: &TargetConfig,
    groups: usize,
    share: usize,
    arena: &Arc<Region>,
    opened: &[OpenedVolume],
    to_control: &mpsc::UnboundedSender<FromGroup>,
) -> anyhow::Result<Vec<GroupHandle>> {
    let io_max = u32::try_from(config.max_io.0).context("max_io")?;
    let extent_max = io_max.max(crate::memory::arena::MIN_EXTENT_BYTES);
    let mut seed = [0; 8];
    getrandom::fill(&mut seed)?;
    let shard_options = ShardOptions {
        dirty_max_bytes: usize::try_from(config.dirty_limit().0)? / groups,
        write_back_delay: config.write_back_delay.into(),
        write_back_max_bytes: io_max,
        seed: u64::from_ne_bytes(seed),
    };
    let slow_io = config.slow_io.map(Into::into);
    let stop_timeout = config.stop_timeout.into();
    let mut handles = Vec::new();
    for (index, others) in OtherGroups::connect(groups)?.into_iter().enumerate() {
        let range = index * share..(index + 1) * share;
        let options = UringOptions {
            volumes: places(opened.len())?,
            registered: Some(range.clone()),
            ..UringOptions::default()
        };
        let store = UringStore::new(Arc::clone(arena), &options)?;
        for warning in store.warnings() {
            tracing::warn!(poll_group = index, "{warning}");
        }
        let cpu = config.cpus.as_ref().and_then(|cpus| cpus.get(index).copied());
        let tuning = Tuning { cpu, spin: spin_mode(config.transport.spin), slow_io, stop_timeout };
        let part = Arena::over(Arc::clone(arena), range, extent_max)?;
        let shard = Shard::new(store, part, shard_options, Instant::now());
        let mut handle = group_thread::start(index, shard, others, tuning, to_control.clone())?;
        for opened in opened {
            handle.add_volume(Arc::clone(&opened.volume), opened.backing.clone())?;
        }
        handles.push(handle);
    }
    Ok(handles)
}

/// The most volumes that a run can serve that starts with this many: each costs a place for a file
/// in the table of every ring, and the kernel allows as many as the process may have open files.
fn places(volumes: usize) -> anyhow::Result<u16> {
    let files = getrlimit(Resource::RLIMIT_NOFILE).map_or(0, |(limit, _)| limit);
    let more = usize::try_from(files / 2)?.saturating_sub(volumes).min(PLACES_MORE);
    u16::try_from(volumes + more.max(1)).context("more than 65535 volumes")
}

/// How hosts prove their identity; `None`: every host that reaches an address may do everything.
///
/// # Errors
/// A key file that is missing or wrong, or hosts with one key.
fn auth_of(config: &TargetConfig) -> anyhow::Result<Option<AuthConfig>> {
    if config.authentication() == Auth::None {
        return Ok(None);
    }
    let keys = config.secret_keys()?;
    for key in &keys {
        tracing::info!(key = %key.public(), "this target proves its key; mounts name it in target_keys");
    }
    Ok(Some(AuthConfig { keys, hosts: Hosts::new(&config.hosts)? }))
}

/// The parts of control, in a new run.
fn parts(
    config: &TargetConfig,
    name: Name,
    state: StateDirectory,
    groups: Vec<GroupHandle>,
    arena: Arc<Region>,
    opened: Vec<OpenedVolume>,
) -> anyhow::Result<ControlParts> {
    let mut instance = [0; 16];
    getrandom::fill(&mut instance)?;
    let io_max_bytes = u32::try_from(config.max_io.0).context("max_io")?;
    let store_of = |opened: &OpenedVolume| {
        let backing = opened.backing.as_ref()?;
        Some((opened.volume.uuid, backing.identity()))
    };
    let backing_of = |opened: &OpenedVolume| {
        opened.backing.clone().map(|backing| (opened.volume.index, backing))
    };
    let notes_of = |opened: &OpenedVolume| (opened.volume.name.to_string(), opened.notes.clone());
    Ok(ControlParts {
        name,
        instance: InstanceId(instance),
        state,
        limits: ConnectionLimits {
            queue_depth_max: config.queue_depth_max,
            in_capsule_bytes: u32::try_from(config.inline.0).context("inline")?,
            io_max_bytes,
            capacity: capacity(config),
            lease: config.lease.into(),
            encrypt: config.transport.encrypt,
        },
        groups,
        arena,
        zeros: Region::allocate(wide(io_max_bytes), PageKind::Normal)?,
        stores: opened.iter().filter_map(store_of).collect(),
        running: config.clone(),
        places: places(opened.len())?,
        backings: opened.iter().filter_map(backing_of).collect(),
        volume_notes: opened.iter().map(notes_of).collect(),
        volumes: opened.into_iter().map(|opened| opened.volume).collect(),
        listening: Vec::new(),
        outages: Outages::default(),
        away: Vec::new(),
        others: Vec::new(),
        drain_timeout: config.drain_timeout.into(),
        stop_timeout: config.stop_timeout.into(),
        auth: None,
        insecure: exposed_to_all(config).is_some(),
        took_over: None,
    })
}

/// Begins a drain at SIGTERM and SIGINT.
async fn drain_at(stops: Stops, requests: mpsc::Sender<ToControl>) {
    while stops.next().await.is_ok() {
        if requests.send(ToControl::Drain(None)).await.is_err() {
            return;
        }
    }
}
