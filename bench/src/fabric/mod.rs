//! `rblk-bench fabric`: what the transports cost by themselves, on any provider and any device.
//!
//! | file | what is in it |
//! |---|---|
//! | `job` | what both ends of a measurement agree on |
//! | `control`, `server`, `end` | the client's connections, the passive end, one end |
//! | [`registration`] | registering memory, by size and pages |
//! | `ping` | ping-pong of SENDs, WRITEs, READs and commands |
//! | `stream` | bandwidth |
//! | `echo` | ping-pong over UDP and TCP sockets |
//! | [`perftest`] | the same by another's word |
//! | [`sysfs`] | the devices of this host |
//!
//! Everything goes through the same traits as the data path ([`rblk_fabric::Poller`]), so what is
//! measured is what rblk has, provider included. Both ends run in this process, a thread each, or
//! one of them on another host.
//!
//! Bounds: each end has at most [`job::WINDOW_MAX`] bytes for what comes and as many for what goes;
//! each measurement ends some seconds after its time, whatever the other end does.

pub(crate) mod control;
mod echo;
mod end;
pub mod job;
pub mod perftest;
mod ping;
pub mod registration;
pub(crate) mod server;
mod stream;
pub mod sysfs;

use std::net::SocketAddr;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use rblk_fabric::{Address, Device, DeviceCaps, Route, Scheme};

use self::control::Control;
use self::echo::Carrier;
use self::end::Broken;
use self::job::{Job, Kind, NOWHERE};
use self::perftest::PerfPlace;
use self::server::Server;
use crate::args::FabricArgs;
use crate::result::{Bandwidth, Fabric, FabricDevice, Latency, PingPong, Wait};
use crate::{child, interrupt};

/// Sizes of pings.
const PING_BYTES: [u32; 2] = [64, 4096];
/// Sizes of streams.
const STREAM_BYTES: [u32; 9] =
    [64, 256, 1 << 10, 4 << 10, 16 << 10, 64 << 10, 128 << 10, 256 << 10, 1 << 20];
/// Messages outstanding in a stream.
const DEPTH: u16 = 64;
/// The address without a network card.
const LOOPBACK: &str = "tcp://127.0.0.1";
/// Largest region that is registered.
const REGION_MAX: u64 = 1 << 40;

/// What is measured on each address.
#[derive(Clone, PartialEq, Debug)]
pub struct Plan {
    /// How long each measurement takes.
    pub time: Duration,
    /// Largest region to register, in bytes.
    pub region: u64,
    /// Sizes of pings.
    pub ping_bytes: Vec<u32>,
    /// Sizes of streams.
    pub stream_bytes: Vec<u32>,
    /// Whether the far end is another host's.
    pub far: bool,
    /// Whether perftest runs beside.
    pub perftest: bool,
}

/// Does what the command line says: measures, or serves until this process is asked to end.
///
/// # Errors
/// The arguments make no sense, or nothing could be measured at all.
pub fn run(args: &FabricArgs) -> Result<Fabric> {
    interrupt::watch()?;
    let time = Duration::try_from_secs_f64(args.seconds).ok().filter(|t| *t <= job::TIME_MAX);
    let time = time.with_context(|| format!("--seconds has to be at most {:?}", job::TIME_MAX))?;
    ensure!(time >= Duration::from_millis(10), "--seconds has to be at least 0.01");
    let region = args.region.0;
    ensure!((4096..=REGION_MAX).contains(&region), "--region has to be from 4KiB to 1TiB");
    let addresses = addresses(args)?;
    if args.serve {
        serve(&addresses)?;
        return Ok(Fabric::default());
    }
    let plan = Plan {
        time,
        region,
        ping_bytes: PING_BYTES.to_vec(),
        stream_bytes: STREAM_BYTES.to_vec(),
        far: args.peer.is_some(),
        perftest: !args.no_perftest,
    };
    let mut fabric = Fabric::default();
    for address in &addresses {
        interrupt::check()?;
        fabric.devices.push(measure(address, &plan, args.device.as_deref()));
    }
    interrupt::check()?;
    if let [only] = &fabric.devices[..]
        && let Some(error) = &only.error
    {
        bail!("{}: {error}", only.address);
    }
    Ok(fabric)
}

/// Serves at all addresses, each on a thread.
fn serve(addresses: &[Address]) -> Result<()> {
    std::thread::scope(|scope| {
        let serving: Vec<_> =
            addresses.iter().map(|address| scope.spawn(|| server::serve(address))).collect();
        let ends = serving.into_iter().map(|thread| match thread.join() {
            Ok(end) => end,
            Err(_) => bail!("a serving thread panicked"),
        });
        ends.collect()
    })
}

/// The addresses of the command line, or those of this host or of the peer.
fn addresses(args: &FabricArgs) -> Result<Vec<Address>> {
    let device = |gid: &sysfs::Gid| args.device.as_ref().is_none_or(|name| *name == gid.device);
    let texts: Vec<String> = if !args.address.is_empty() {
        args.address.clone()
    } else if let Some(host) = &args.peer {
        match host.contains("://") {
            true => vec![host.clone()],
            false => vec![format!("rdma://{host}"), format!("tcp://{host}")],
        }
    } else {
        let gids = sysfs::gids();
        let mut texts: Vec<String> = Vec::new();
        for gid in gids.iter().filter(|gid| device(gid)) {
            let text = format!("rdma://{}", bracketed(gid.ip));
            if !texts.contains(&text) {
                texts.push(text);
            }
        }
        if args.serve {
            texts.extend(gids.first().map(|gid| format!("tcp://{}", bracketed(gid.ip))));
        }
        if texts.is_empty() || !args.serve {
            texts.push(LOOPBACK.to_owned());
        }
        texts
    };
    texts.iter().map(|text| Ok(text.parse()?)).collect()
}

fn bracketed(ip: std::net::IpAddr) -> String {
    match ip {
        std::net::IpAddr::V4(ip) => ip.to_string(),
        std::net::IpAddr::V6(ip) => format!("[{ip}]"),
    }
}

/// Measures one address. What goes wrong is in the result.
#[must_use]
pub fn measure(address: &Address, plan: &Plan, device: Option<&str>) -> FabricDevice {
    let mut result = FabricDevice { address: address.to_string(), ..FabricDevice::default() };
    tell(&format!("{address}"));
    if let Err(error) = measure_into(address, plan, device, &mut result) {
        tell(&format!("{address}: {error:#}"));
        result.error = Some(format!("{error:#}"));
    }
    result
}

fn measure_into(
    address: &Address,
    plan: &Plan,
    wanted: Option<&str>,
    result: &mut FabricDevice,
) -> Result<()> {
    let control = Control::start()?;
    // A free port, so that a target or another run here is no matter.
    let local = (!plan.far).then(|| Server::start(&Address { port: 0, ..address.clone() }));
    let local = local.transpose()?;
    let address = local.as_ref().map_or(address, Server::address).clone();
    let address = &address;
    let route = control.wait(Route::resolve(address, &Control::options()))?;
    let device = route.device();
    drop(route);
    let caps = device.caps().clone();
    result.title = format!("{} ({})", caps.name, caps.transport);
    if let Some(wanted) = wanted.filter(|_| address.scheme == Scheme::Rdma) {
        ensure!(wanted == caps.name, "{address} is an address of {}, not of {wanted}", caps.name);
    }
    registrations(&device, plan, result)?;
    echoes(&control, address, plan, result)?;
    pings(&control, address, &caps, plan, result)?;
    streams(&control, address, plan, result)?;
    drop(local);
    if plan.perftest && !plan.far && address.scheme == Scheme::Rdma {
        perftests(address, plan, result)?;
    }
    Ok(())
}

fn registrations(device: &Device, plan: &Plan, result: &mut FabricDevice) -> Result<()> {
    tell(&format!("  {}: registration up to {} MiB", result.title, plan.region >> 20));
    let pd = device.alloc_pd()?;
    result.registration =
        registration::measure(&pd, plan.region, |word| tell(&format!("  {word}")))?;
    Ok(())
}

fn echoes(
    control: &Control,
    address: &Address,
    plan: &Plan,
    result: &mut FabricDevice,
) -> Result<()> {
    let job = Job {
        kind: Kind::Echo,
        wait: Wait::Events,
        bytes: 64,
        depth: 1,
        time: Duration::ZERO,
        buffer: NOWHERE,
    };
    let (end, offer) = control.connect(address, job)?;
    drop(end);
    let ip = server::ip_of(address)?;
    for (carrier, port) in [(Carrier::Udp, offer.udp_port), (Carrier::Tcp, offer.tcp_port)] {
        for bytes in &plan.ping_bytes {
            for wait in [Wait::Polling, Wait::Events] {
                let to = SocketAddr::new(ip, port);
                let measured = echo::measure(carrier, to, *bytes, wait, plan.time);
                let latency = measured.map(|h| h.latency()).map_err(|e| format!("{e:#}"));
                push_ping(result, carrier.word(), *bytes, wait, latency)?;
            }
        }
    }
    Ok(())
}

fn pings(
    control: &Control,
    address: &Address,
    caps: &DeviceCaps,
    plan: &Plan,
    result: &mut FabricDevice,
) -> Result<()> {
    for kind in [Kind::SendPing, Kind::WritePing, Kind::ReadPing, Kind::CommandPing] {
        if kind == Kind::CommandPing && !caps.write_with_imm {
            continue;
        }
        for bytes in &plan.ping_bytes {
            for wait in [Wait::Polling, Wait::Events] {
                // A WRITE makes no event at the peer.
                if kind == Kind::WritePing && wait == Wait::Events {
                    continue;
                }
                let measured = ping::measure(control, address, kind, *bytes, wait, plan.time);
                let latency = measured.map(|h| h.latency()).map_err(|e| e.to_string());
                push_ping(result, kind.word(), *bytes, wait, latency)?;
            }
        }
    }
    Ok(())
}

fn push_ping(
    result: &mut FabricDevice,
    what: &str,
    bytes: u32,
    wait: Wait,
    latency: Result<Latency, String>,
) -> Result<()> {
    interrupt::check()?;
    let way = if wait == Wait::Events { "events" } else { "polling" };
    let (latency, error) = match latency {
        Ok(latency) => (latency, None),
        Err(error) => (Latency::default(), Some(error)),
    };
    match &error {
        None => tell(&format!("  {what} {bytes} B, {way}: {} us", us(latency.p50))),
        Some(error) => tell(&format!("  {what} {bytes} B, {way}: {error}")),
    }
    let what = what.to_owned();
    result.pingpong.push(PingPong { what, bytes: bytes.into(), wait, latency, error });
    Ok(())
}

fn streams(
    control: &Control,
    address: &Address,
    plan: &Plan,
    result: &mut FabricDevice,
) -> Result<()> {
    for kind in [Kind::SendStream, Kind::WriteStream, Kind::ReadStream] {
        for bytes in &plan.stream_bytes {
            let measured = stream::measure(control, address, kind, *bytes, DEPTH, plan.time);
            interrupt::check()?;
            match measured {
                Ok(bandwidth) => {
                    tell(&format!(
                        "  {} {bytes} B x {}: {}",
                        kind.word(),
                        bandwidth.depth,
                        mib(&bandwidth)
                    ));
                    result.bandwidth.push(bandwidth);
                }
                Err(Broken::Interrupted) => bail!("interrupted"),
                Err(error) => tell(&format!("  {} {bytes} B: {error}", kind.word())),
            }
        }
    }
    Ok(())
}

fn perftests(address: &Address, plan: &Plan, result: &mut FabricDevice) -> Result<()> {
    let all = sysfs::gids();
    let Some(gid) = sysfs::gid_of(server::ip_of(address)?, &all) else {
        tell("  perftest: the address is no GID of a device");
        return Ok(());
    };
    let place = PerfPlace::of(gid);
    let seconds = plan.time.as_secs().max(1);
    let latencies = plan.ping_bytes.iter().flat_map(|bytes| {
        let tools = ["ib_send_lat", "ib_write_lat", "ib_read_lat"];
        tools.into_iter().flat_map(move |tool| {
            // A WRITE makes no event at the peer.
            let ways = if tool == "ib_write_lat" { &[false][..] } else { &[false, true] };
            ways.iter().map(move |events| (tool, u64::from(*bytes), *events))
        })
    });
    let bandwidths = ["ib_send_bw", "ib_write_bw", "ib_read_bw"]
        .into_iter()
        .flat_map(|tool| [4096, 128 << 10].into_iter().map(move |bytes| (tool, bytes, false)));
    for (tool, bytes, events) in latencies.chain(bandwidths) {
        if !child::is_installed(tool) {
            continue;
        }
        interrupt::check()?;
        let perf = perftest::run(tool, &place, bytes, events, seconds);
        let way = if events { ", events" } else { "" };
        match (&perf.error, perf.mean_us, perf.mib_per_s) {
            (Some(error), ..) => tell(&format!("  {tool} {bytes} B{way}: {error}")),
            (None, Some(us), _) => tell(&format!("  {tool} {bytes} B{way}: {us:.2} us")),
            (None, None, rate) => {
                tell(&format!("  {tool} {bytes} B{way}: {:.0} MiB/s", rate.unwrap_or(0.0)));
            }
        }
        result.perftest.push(perf);
    }
    Ok(())
}

fn mib(bandwidth: &Bandwidth) -> String {
    format!("{:.1} MiB/s", bandwidth.bytes_per_s / f64::from(1 << 20))
}

fn us(ns: u64) -> String {
    format!("{}.{:02}", ns / 1000, ns % 1000 / 10)
}

/// Prints progress.
fn tell(word: &str) {
    eprintln!("rblk-bench: {word}");
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn everything_is_measured_on_the_software_provider() {
        let plan = Plan {
            time: Duration::from_millis(20),
            region: 1 << 20,
            ping_bytes: vec![64, 4096],
            stream_bytes: vec![64, 4096, 1 << 20],
            far: false,
            perftest: true,
        };
        let result = measure(&LOOPBACK.parse().unwrap(), &plan, None);
        assert_eq!(result.error, None);
        assert!(result.title.contains("soft"), "{}", result.title);
        assert_eq!(result.registration.iter().filter(|r| r.bytes <= 1 << 20).count(), 9);
        for what in ["UDP", "TCP", "SEND", "WRITE", "READ", "COMMAND"] {
            for bytes in [64, 4096] {
                for wait in [Wait::Polling, Wait::Events] {
                    let found = result
                        .pingpong
                        .iter()
                        .find(|p| p.what == what && p.bytes == bytes && p.wait == wait);
                    if what == "WRITE" && wait == Wait::Events {
                        assert!(found.is_none());
                        continue;
                    }
                    let found = found.unwrap_or_else(|| panic!("{what} {bytes} {wait:?}"));
                    assert_eq!(found.error, None, "{what} {bytes} {wait:?}");
                    assert!(found.latency.p50 > 0, "{what} {bytes} {wait:?}");
                }
            }
        }
        for what in ["SEND", "WRITE", "READ"] {
            for bytes in [64, 4096, 1 << 20] {
                let found = result.bandwidth.iter().find(|b| b.what == what && b.bytes == bytes);
                assert!(found.is_some_and(|b| b.bytes_per_s > 0.0), "{what} {bytes}");
            }
        }
    }

    #[test]
    fn a_server_refuses_what_is_no_job() {
        let server =
            Server::start(&Address { scheme: Scheme::Tcp, host: "127.0.0.1".to_owned(), port: 0 })
                .unwrap();
        let control = Control::start().unwrap();
        let refused = control.wait(async {
            let route = Route::resolve(server.address(), &Control::options()).await.unwrap();
            let pd = route.device().alloc_pd().unwrap();
            let job = Job {
                kind: Kind::Echo,
                wait: Wait::Events,
                bytes: 64,
                depth: 1,
                time: Duration::ZERO,
                buffer: NOWHERE,
            };
            let limits = end::limits(route.device().caps(), &job);
            let (_poller, handle) = pd.poller(64).unwrap();
            let hello = rblk_fabric::ConnectionHello(b"let me in".to_vec());
            route.connect(&pd, &handle, limits, &hello).await.map(drop)
        });
        match refused {
            Err(rblk_fabric::FabricError::Rejected { hello, .. }) => {
                assert!(hello.starts_with(b"not a job"), "{hello:?}");
            }
            other => panic!("{other:?}"),
        }
        // And it is still there for those who know it.
        let histogram = ping::measure(
            &control,
            server.address(),
            Kind::SendPing,
            64,
            Wait::Events,
            Duration::from_millis(20),
        );
        assert!(histogram.unwrap().count() > 0);
    }

    #[test]
    fn a_port_without_a_server_is_an_error_with_the_address() {
        let plan = Plan {
            time: Duration::from_millis(20),
            region: 4096,
            ping_bytes: vec![64],
            stream_bytes: vec![],
            far: true,
            perftest: false,
        };
        // The port of a connected socket: no other process has it, and no process listens there.
        let other = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let taken = std::net::TcpStream::connect(other.local_addr().unwrap()).unwrap();
        let port = taken.local_addr().unwrap().port();
        let address: Address = format!("tcp://127.0.0.1:{port}").parse().unwrap();
        let result = measure(&address, &plan, None);
        assert!(result.error.is_some_and(|error| error.contains("127.0.0.1")));
    }
}
