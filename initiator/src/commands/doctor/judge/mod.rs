//! The meaning of the facts: findings, in the order of the report. No I/O.

use std::collections::{BTreeMap, BTreeSet};

use rblk_config::{ByteSize, Encrypt, MountConfig};
use rblk_fabric::{Address, FirewallPort, Scheme, Transport};
use rblk_operate::doctor::{
    Finding, KernelVersion, RdmaDevice, RdmaPort, Verdict, judge_route, judge_tls,
};

use super::facts::{DeadMount, Facts, ServedMount, UNIT};
use super::peer::Peer;
use crate::front::ublk::{Features, UblkError};
use crate::mount::device::server::ServedBy;
use crate::mount::note::leftovers::Condition;
use rblk_operate::mount::probe_result::{LargeRead, Probe, ProbeError, ReadFault};

/// The first kernel with all ublk commands that rblk uses.
const KERNEL_MIN: KernelVersion = KernelVersion(6, 4);
/// The assumed number of hardware queues, for a mount that sets none.
const QUEUES_ASSUMED: u16 = 4;

/// The host itself. `rdma`: whether mounts may go by RDMA.
pub(super) fn host(facts: &Facts, config: &MountConfig, rdma: bool) -> Vec<Finding> {
    let host = &facts.host;
    let mut found = vec![host.judge_kernel(KERNEL_MIN, "ublk")];
    let faults = host.judge_ublk();
    if !faults.is_empty() {
        // They name the kernel, too.
        found = faults;
    }
    found.push(host.judge_io_uring());
    found.push(ublk(&facts.ublk, facts.ublk_minor, facts.host.io_uring.is_some()));
    found.push(match rdma {
        true => host.judge_memlock(buffer_bytes(config), "a mount"),
        false => Finding::skip("memlock", "tcp:// locks no memory"),
    });
    found.push(host.judge_clock());
    found.push(facts.run_dir.judge("run dir", 0, "root"));
    found.extend(facts.systemd.judge(UNIT));
    found
}

/// Bytes of the buffers that a mount registers.
fn buffer_bytes(config: &MountConfig) -> u64 {
    let queues = config.queues.unwrap_or(QUEUES_ASSUMED);
    u64::from(queues) * u64::from(config.queue_depth) * config.max_io.0
}

/// The driver. A refused io_uring is reported elsewhere.
fn ublk(asked: &Result<Features, UblkError>, minor: Option<u32>, no_io_uring: bool) -> Finding {
    let yes_no = |yes: bool| if yes { "yes" } else { "no" };
    match asked {
        Ok(features) => {
            let recovers =
                features.contains(Features::USER_RECOVERY | Features::USER_RECOVERY_REISSUE);
            let resize = match features.contains(Features::UPDATE_SIZE) {
                true => "yes",
                false => "no (needs 6.16)",
            };
            let zero_copy = yes_no(features.contains(Features::SUPPORT_ZERO_COPY));
            let found = format!(
                "recovery {}; resize {resize}; zero copy {zero_copy} (not used)",
                yes_no(recovers)
            );
            match recovers {
                true => Finding::ok("ublk", found),
                false => Finding::fail("ublk", found),
            }
        }
        Err(UblkError::NoIoUring { .. }) if no_io_uring => Finding::skip("ublk", "needs io_uring"),
        Err(UblkError::NoDriver { .. }) => match minor {
            Some(minor) => Finding::fail("ublk", "loaded, but /dev/ublk-control is missing")
                .fix(format!("mknod -m 600 /dev/ublk-control c 10 {minor}")),
            None => Finding::fail("ublk", "the driver is not loaded (CONFIG_BLK_DEV_UBLK)")
                .fix("modprobe ublk_drv"),
        },
        Err(UblkError::NotPermitted { .. }) => {
            Finding::skip("ublk", "/dev/ublk-control is there, and only root may ask it")
        }
        Err(error) => Finding::fail("ublk", error.to_string()),
    }
}

/// The key file of this host. A host without target keys needs none.
pub(super) fn key_file(facts: &Facts, config: &MountConfig) -> Finding {
    let path = config.key_file.display();
    match (&facts.key, config.target_keys.is_empty()) {
        (Ok(_), _) => Finding::ok("key file", format!("{path}, only its owner reads it")),
        (Err(error), true) if error.is_missing() => {
            Finding::skip("key file", format!("no {path}: this host has no key yet"))
        }
        (Err(error), _) => {
            let finding = Finding::fail("key file", format!("{path}: {}", error.brief()));
            match error.fix() {
                Some(fix) => finding.fix(fix),
                None => finding,
            }
        }
    }
}

/// Whether the kernel can encrypt, if the mount needs that.
pub(super) fn encryption(config: &MountConfig, tcp: bool) -> Option<Finding> {
    let wanted = tcp && !config.target_keys.is_empty() && config.transport.encrypt != Encrypt::Off;
    wanted.then(|| {
        let lack = rblk_fabric::soft::tls::kernel_has_tls().map_err(|why| why.to_string());
        judge_tls(lack, config.transport.encrypt == Encrypt::Required)
    })
}

/// The way to a target: its name and its route.
pub(super) fn way(peer: &Peer, facts: &Facts) -> Vec<Finding> {
    let mut found = Vec::new();
    let host = &peer.address.host;
    match &peer.resolved {
        Ok(resolved) if peer.has_name() => {
            let all: Vec<String> = resolved.iter().map(|a| a.ip().to_string()).collect();
            found.push(Finding::ok("name", format!("{host} is {}", all.join(", "))));
        }
        Ok(_) => {}
        Err(why) => found.push(
            Finding::fail("name", format!("{host} cannot be resolved: {why}"))
                .fix(format!("echo 'IP-ADDRESS {host}' >>/etc/hosts")),
        ),
    }
    if let Some(route) = &peer.route {
        let rdma = peer.address.scheme == Scheme::Rdma;
        found.push(judge_route(route, &facts.interfaces, &facts.devices, rdma));
    }
    found
}

/// The port of this host by which packets to a target leave: its RDMA device and interface, or the
/// interface alone. Two interfaces of one port (VLANs) are one.
fn port_to(peer: &Peer, facts: &Facts) -> Option<String> {
    let interface = &peer.route.as_ref()?.interface(&facts.interfaces)?.name;
    Some(match rdma_port_to(peer, facts) {
        Some((device, port)) if device.ports.len() > 1 => {
            format!("port {} of {}", port.number, device.name)
        }
        Some((device, _)) => device.name.clone(),
        None => interface.clone(),
    })
}

/// The RDMA device and its port by which packets to a target leave.
fn rdma_port_to<'f>(peer: &Peer, facts: &'f Facts) -> Option<(&'f RdmaDevice, &'f RdmaPort)> {
    let interface = &peer.route.as_ref()?.interface(&facts.interfaces)?.name;
    let ports = |device: &'f RdmaDevice| device.ports.iter().map(move |port| (device, port));
    let mut all = facts.devices.iter().flat_map(ports);
    all.find(|(_, port)| port.interfaces.contains(interface))
}

/// Whether the paths of a mount leave by ports that differ in a property of theirs.
fn unequal(peers: &[Peer], what: &str, value: impl Fn(&Peer) -> Option<String>) -> Option<Finding> {
    let known = peers.iter().filter_map(|peer| Some((&peer.address, value(peer)?)));
    let known: Vec<(&Address, String)> = known.collect();
    let all: BTreeSet<&String> = known.iter().map(|(_, value)| value).collect();
    (all.len() > 1).then(|| {
        let all: Vec<String> = known.iter().map(|(at, value)| format!("{at} {value}")).collect();
        Finding::warn("paths", format!("their ports differ in {what}: {}", all.join(", ")))
    })
}

/// Whether the paths of a mount that uses all of them fail together, and whether they are alike.
pub(super) fn paths(peers: &[Peer], facts: &Facts, config: &MountConfig) -> Vec<Finding> {
    if !config.uses_all_paths() || peers.len() < 2 {
        return Vec::new();
    }
    let mut by_port: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for peer in peers {
        let Some(port) = port_to(peer, facts) else {
            return vec![Finding::skip("paths", format!("needs a route to {}", peer.address))];
        };
        by_port.entry(port).or_default().push(peer.address.to_string());
    }
    let shared = by_port.iter().filter(|(_, addresses)| addresses.len() > 1);
    let shared: Vec<Finding> = shared
        .map(|(port, addresses)| {
            let (count, which) = (addresses.len(), addresses.join(" and "));
            Finding::warn(
                "paths",
                format!("{count} paths, one cable: {which} leave by {port}, and fail together"),
            )
        })
        .collect();
    let mtu = |peer: &Peer| peer.route.as_ref()?.interface(&facts.interfaces)?.mtu;
    let rate = |peer: &Peer| rdma_port_to(peer, facts).map(|(_, port)| port.rate.clone());
    let differ = [
        unequal(peers, "MTU", |peer| mtu(peer).map(|bytes| bytes.to_string())),
        unequal(peers, "speed", |peer| rate(peer).filter(|rate| !rate.is_empty())),
    ];
    let found: Vec<Finding> = shared.into_iter().chain(differ.into_iter().flatten()).collect();
    match found.is_empty() {
        true => vec![Finding::ok("paths", "each leaves by a port of its own")],
        false => found,
    }
}

/// The subject of a finding that makes a connection pointless.
pub(super) fn blocks(finding: &Finding) -> Option<String> {
    let blocks = match finding.verdict {
        Verdict::Fail => true,
        // A route that was not judged for lack of a device or an address.
        Verdict::Skip => finding.subject == "route",
        Verdict::Ok | Verdict::Warn => false,
    };
    blocks.then(|| match finding.subject.as_str() {
        "name" | "route" | "rdma" | "memlock" | "key file" => format!("the {}", finding.subject),
        port => format!("port {port}"),
    })
}

/// The likely address of the target: the usual port, if nothing listens on the named one.
pub(super) fn may_be_elsewhere(found: &Probe, address: &Address) -> Option<Address> {
    let Probe::Failed { error: ProbeError::Refused, .. } = found else { return None };
    let scheme = match address.scheme {
        Scheme::Rdma => "rdma",
        Scheme::Tcp => "tcp",
    };
    let host = match address.host.contains(':') {
        true => format!("[{}]", address.host),
        false => address.host.clone(),
    };
    let usual: Address = format!("{scheme}://{host}").parse().ok()?;
    (usual != *address).then_some(usual)
}

/// The result of a try to connect.
pub(super) fn connection(
    probe: &Probe,
    peer: &Peer,
    facts: &Facts,
    config: &MountConfig,
    elsewhere: Option<&Address>,
) -> Vec<Finding> {
    match probe {
        Probe::Works { target, transport, device, volumes, data } => {
            let some = match volumes.len() {
                1 => "1 volume".to_owned(),
                n => format!("{n} volumes"),
            };
            let mut found = vec![
                Finding::ok("port", format!("{} answers", peer.address.port)),
                Finding::ok(
                    "connect",
                    format!("{target}, {transport} over {device}, self-test passed, {some}"),
                ),
                match config.target_keys.is_empty() {
                    true => Finding::skip("keys", "none given, so neither end proves a key"),
                    false => Finding::ok("keys", "both ends proved their keys"),
                },
            ];
            found.extend(data.as_ref().map(|data| large_read(data, peer, facts)));
            if !config.volume.is_empty() {
                found.push(volume(&config.volume, volumes, &peer.address.host));
            }
            found
        }
        Probe::Failed { error, text } => vec![failed(*error, text, peer, facts, elsewhere)],
    }
}

/// One READ as large as a mount's.
fn large_read(read: &LargeRead, peer: &Peer, facts: &Facts) -> Finding {
    let LargeRead { volume, bytes, took, fault } = read;
    let size = ByteSize(*bytes);
    match fault {
        None => {
            let ms = took.as_secs_f64() * 1000.0;
            Finding::ok("data", format!("{size} of {volume} read in {ms:.1}ms"))
        }
        Some(ReadFault::Errno(errno)) => {
            let error = std::io::Error::from_raw_os_error(*errno);
            Finding::fail("data", format!("{size} of {volume} cannot be read: {error}"))
                .fix_at(&peer.address.host, "rblk-target status")
        }
        Some(ReadFault::Silent | ReadFault::Ended(_)) => {
            let way = peer.route.as_ref().and_then(|route| route.interface(&facts.interfaces));
            // Without the headers of IP and ICMP.
            let payload =
                way.and_then(|interface| interface.mtu).unwrap_or(1500).saturating_sub(28);
            Finding::fail(
                "data",
                format!(
                    "logins pass, and {size} of {volume} do not come: MTU? Something on the way drops large packets"
                ),
            )
            .fix(format!("ping -M do -c 3 -s {payload} {}", peer.address.host))
        }
    }
}

fn volume(name: &str, volumes: &[String], host: &str) -> Finding {
    if volumes.iter().any(|v| v == name) {
        return Finding::ok("volume", name);
    }
    let has = match volumes.is_empty() {
        true => "none".to_owned(),
        false => volumes.join(", "),
    };
    Finding::fail("volume", format!("the target shows this host no `{name}`; it shows: {has}"))
        .fix_at(host, "rblk-target status")
}

fn failed(
    error: ProbeError,
    text: &str,
    peer: &Peer,
    facts: &Facts,
    elsewhere: Option<&Address>,
) -> Finding {
    let Address { host, port, .. } = &peer.address;
    let passage = passage(peer, facts);
    match error {
        ProbeError::Refused => match elsewhere {
            Some(usual) => Finding::fail(
                "port",
                format!(
                    "nothing listens on port {port}, and a target answers on port {}",
                    usual.port
                ),
            )
            .fix(format!("rblk-initiator doctor {usual}")),
            None => Finding::fail("port", format!("nothing listens on port {port} of {host}"))
                .fix_at(host, "systemctl start rblk-target || rblk-target doctor"),
        },
        ProbeError::TimedOut => {
            let found = format!(
                "{host} does not answer: a firewall drops packets ({passage} must pass), or the host \
                 is down ({text})"
            );
            // To make the device anew ends every connection of this host that uses it. So the users
            // come first.
            match software_device(peer, facts) {
                Some((device, interface)) => Finding::fail(
                    "port",
                    format!(
                        "{found}; or {device}, which is Soft-RoCE, is mute since {interface} was down or lost its \
                         address: list its users before you delete it and add it again"
                    ),
                )
                .fix(format!("rdma resource show qp link {device}")),
                None => Finding::fail("port", found).fix_at(host, "rblk-target doctor"),
            }
        }
        ProbeError::NotRblk => Finding::fail("connect", text).fix_at(host, "rblk-target status"),
        ProbeError::WrongTargetKey => {
            Finding::fail("keys", "the target has none of the target_keys of this host")
                .fix_at(host, "rblk-target key show")
        }
        ProbeError::HostNotAllowed => {
            let key = facts.key.as_ref().map_or_else(|_| "KEY".to_owned(), ToString::to_string);
            Finding::fail("keys", "the target does not let in the key of this host")
                .fix_at(host, format!("rblk-target host add NAME --key {key} --volume VOLUME:rw"))
        }
        ProbeError::KeysWanted => keys_wanted(&peer.address, facts),
        ProbeError::NoProof => Finding::fail("keys", "the target proves no key")
            .fix_at(host, "rblk-target key new; rblk-target doctor"),
        ProbeError::NotEncrypted => Finding::fail("tls", text).fix_at(host, "rblk-target doctor"),
        ProbeError::Version => Finding::fail("connect", text),
        ProbeError::Busy => Finding::fail("connect", text).fix_at(host, "rblk-target status"),
        ProbeError::Memlock => Finding::fail("memlock", text).fix("ulimit -l unlimited"),
        ProbeError::SelfTest => Finding::fail("self-test", text),
        ProbeError::NoVerbs | ProbeError::Other => Finding::fail("connect", text),
    }
}

/// The target asks for a key, and none was given to try. A mount that has that target proves more
/// than a try.
fn keys_wanted(address: &Address, facts: &Facts) -> Finding {
    let is_there = |text: &str| text.parse().is_ok_and(|other: Address| other == *address);
    let served = facts.served.iter().filter_map(|mount| mount.status.as_ref());
    let mut with_it =
        served.filter(|s| s.auth == "key" && s.outage().is_none() && is_there(&s.address));
    if let Some(mount) = with_it.next() {
        let text = format!("none given, and mount {} proves its own there", mount.name);
        return Finding::skip("keys", format!("{text}; --config or --target-key tries others"));
    }
    let fix = match facts.key.is_ok() {
        true => format!("rblk-initiator doctor {address} --target-key KEY"),
        false => "rblk-initiator key new".to_owned(),
    };
    Finding::fail("keys", "the target lets in only hosts that prove a key").fix(fix)
}

/// The traffic that firewalls must pass on the way to a peer.
fn passage(peer: &Peer, facts: &Facts) -> String {
    let port = peer.address.port;
    let transport = match (peer.address.scheme, device_of(peer, facts)) {
        (Scheme::Tcp, _) => Transport::SoftTcp,
        (Scheme::Rdma, Some(device)) if device.is_iwarp => Transport::Iwarp,
        (Scheme::Rdma, Some(device)) if device.ports.iter().any(|port| port.is_infiniband) => {
            return "InfiniBand".to_owned();
        }
        (Scheme::Rdma, Some(_)) => Transport::Roce,
        (Scheme::Rdma, None) => {
            return format!("UDP port 4791 for RoCE, TCP port {port} for iWARP");
        }
    };
    FirewallPort::of(transport, port)
        .map_or_else(|| format!("port {port}"), |port| port.to_string())
}

/// The RDMA device on the route to a peer.
fn device_of<'f>(peer: &Peer, facts: &'f Facts) -> Option<&'f RdmaDevice> {
    let route = peer.route.as_ref().filter(|_| peer.address.scheme == Scheme::Rdma)?;
    let interface = &route.interface(&facts.interfaces)?.name;
    let has_it =
        |device: &&RdmaDevice| device.ports.iter().any(|p| p.interfaces.contains(interface));
    facts.devices.iter().find(has_it)
}

/// The Soft-RoCE device on the route to a peer over RDMA, and its interface.
fn software_device<'f>(peer: &Peer, facts: &'f Facts) -> Option<(&'f str, &'f str)> {
    let route = peer.route.as_ref().filter(|_| peer.address.scheme == Scheme::Rdma)?;
    let interface = &route.interface(&facts.interfaces)?.name;
    let is_there = |device: &&RdmaDevice| {
        let mut ports = device.ports.iter();
        device.is_software && !device.is_iwarp && ports.any(|p| p.interfaces.contains(interface))
    };
    facts.devices.iter().find(is_there).map(|device| (device.name.as_str(), interface.as_str()))
}

/// The mounts: those that have lost their target, the leftovers of dead ones, and the number of the
/// others.
pub(super) fn mounts(facts: &Facts) -> Vec<Finding> {
    if !facts.is_root {
        return vec![Finding::skip("mounts", "only root may look at them")];
    }
    let dead = facts.dead.iter().filter_map(dead_mount);
    let without_note = facts.without_note.iter().map(|(disk, server)| match server {
        ServedBy::Process(pid) => Finding::warn(
            "mounts",
            format!("{disk}: process {pid} serves it, and its note is gone: no command can ask it"),
        )
        .fix(format!("rblk-initiator umount {disk}")),
        ServedBy::Elsewhere => Finding::warn(
            "mounts",
            format!("{disk}: it is served elsewhere: in another PID namespace or container"),
        ),
        ServedBy::Nobody => {
            Finding::fail("mounts", format!("{disk}: its process died and its note is gone"))
                .fix(format!("rblk-initiator umount --force {disk}"))
        }
    });
    let served = facts.served.iter().filter_map(served_mount);
    let mut found: Vec<Finding> = dead.chain(without_note).chain(served).collect();
    if found.is_empty() {
        found.push(Finding::ok(
            "mounts",
            match facts.served.len() {
                0 => "none, and nothing left of dead ones".to_owned(),
                n => format!("{n}, each with its process and its target"),
            },
        ));
    }
    found
}

/// A mount that has lost its target, or does not say.
fn served_mount(mount: &ServedMount) -> Option<Finding> {
    let Some(status) = &mount.status else {
        let text = format!("{}: its process does not answer", mount.name);
        return Some(
            Finding::warn("mounts", text).fix(format!("rblk-initiator status {}", mount.name)),
        );
    };
    let outage = Finding::fail("mounts", status.outage()?);
    Some(match status.target.as_slice() {
        [] => outage,
        addresses => outage.fix(format!("rblk-initiator doctor {}", addresses.join(" "))),
    })
}

fn dead_mount(mount: &DeadMount) -> Option<Finding> {
    let DeadMount { name, condition, disk } = mount;
    let disk = disk.as_deref().unwrap_or("its disk");
    Some(match condition {
        Condition::Nothing | Condition::Running => return None,
        Condition::Ending | Condition::Waiting => Finding::fail(
            "mounts",
            format!("{name}: its process died, and requests to {disk} wait"),
        )
        .fix(format!("rblk-initiator recover {name}")),
        Condition::Unusable => Finding::fail("mounts", format!("{name}: its note cannot be used"))
            .fix(format!("rblk-initiator umount --force {name}")),
        Condition::Diskless | Condition::Gone => {
            Finding::warn("mounts", format!("{name}: its process died, and its disk is gone"))
                .fix(format!("rblk-initiator umount {name}"))
        }
    })
}

#[cfg(test)]
mod tests;
