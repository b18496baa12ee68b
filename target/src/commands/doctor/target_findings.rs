//! Findings from the facts, in the order of the report. No I/O.

use std::io;
use std::net::IpAddr;
use std::path::{Path, PathBuf};

use rblk_config::quoted::Quoted;
use rblk_config::{Auth, ConfigError, Encrypt, HugePages, TargetConfig};
use rblk_fabric::Scheme;
use rblk_fabric::soft::tls::NoTls;
use rblk_operate::doctor::{
    Finding, KernelVersion, Needs, Verdict, far_cpus, judge_listen, judge_rdma, judge_tls,
};

use super::seen::{Seen, Trouble};
use crate::commands::doctor::target_facts::{Facts, Listen};
use crate::memory::demand::{Demand, NotEnoughMemory};
use rblk_operate::target::defaults::{NO_HOST, default_poll_groups};
use rblk_operate::target::status::{TargetStatus, VolumeStatus};

/// The first kernel with the io_uring operations of the stores.
const KERNEL_MIN: KernelVersion = KernelVersion(5, 19);

/// The configuration itself.
pub(super) fn config(
    path: Option<&Path>,
    loaded: Option<&Result<TargetConfig, ConfigError>>,
    seen: &Seen,
) -> Finding {
    match (path, loaded) {
        (Some(path), Some(Ok(_))) => match &seen.config {
            Some(trouble) => failed("config", trouble.why.clone(), trouble),
            None => Finding::ok("config", path.display().to_string()),
        },
        // The text of each fault contains its remedy.
        (Some(_), Some(Err(error))) => Finding::fail("config", error.to_string()),
        _ => Finding::skip("config", "no /etc/rblk/target.toml; name a file with --config"),
    }
}

/// A failure, with the command that mends it.
fn failed(subject: &str, found: String, trouble: &Trouble) -> Finding {
    let finding = Finding::fail(subject, found);
    match &trouble.fix {
        Some(fix) => finding.fix(fix),
        None => finding,
    }
}

/// The host itself.
pub(super) fn host(facts: &Facts, config: Option<&TargetConfig>) -> Vec<Finding> {
    let host = &facts.host;
    let mut found = vec![host.judge_kernel(KERNEL_MIN, "a target"), host.judge_io_uring()];
    if let Some(config) = config {
        let needed = demand(config).registered_bytes();
        found.push(match needed {
            0 => Finding::skip("memlock", "tcp:// registers no memory"),
            needed => host.judge_memlock(needed, "this target"),
        });
    }
    found.push(host.judge_clock());
    found
}

fn demand(config: &TargetConfig) -> Demand {
    Demand::of(config, config.poll_groups.map_or_else(default_poll_groups, usize::from))
}

/// Memory of the arena and its pages.
pub(super) fn memory(facts: &Facts, config: &TargetConfig) -> Vec<Finding> {
    let demand = demand(config);
    if facts.running.is_ok() || facts.deaf.is_some() {
        return vec![Finding::skip("memory", "the running target has it")];
    }
    let pages = match demand.pages(facts.memory.huge) {
        Ok(pages) => pages,
        Err(NotEnoughMemory::HugePages { needed, free, total }) => {
            let found =
                format!("hugepages = \"required\": {free} are free, the arena needs {needed}");
            let fix = format!("sysctl vm.nr_hugepages={}", total + (needed - free));
            return vec![Finding::fail("huge pages", found).fix(fix)];
        }
        Err(error) => return vec![Finding::fail("huge pages", error.to_string())],
    };
    let mut found = Vec::new();
    if config.hugepages == HugePages::Required {
        found.push(Finding::ok("huge pages", "enough are free"));
    }
    found.push(match demand.fits(&facts.memory, pages) {
        Ok(()) => {
            let mib = demand.arena_bytes() >> 20;
            Finding::ok("memory", format!("the arena of {mib}MiB fits"))
        }
        Err(error) => Finding::fail("memory", error.to_string()),
    });
    found
}

/// RDMA devices, and the addresses to listen on.
pub(super) fn network(facts: &Facts, config: &TargetConfig) -> Vec<Finding> {
    let over_rdma = || facts.listens.iter().filter(|l| l.address.scheme == Scheme::Rdma);
    let specific = |listen: &Listen| listen.ip.filter(|ip| !ip.is_unspecified());
    // An address that means all: any device will do.
    let means_all = over_rdma().any(|listen| specific(listen).is_none());
    let addresses = over_rdma().filter_map(specific).filter(|_| !means_all);
    let needs = Needs { wanted: over_rdma().next().is_some(), addresses: addresses.collect() };
    let mut found = judge_rdma(&facts.devices, &facts.interfaces, &needs);
    found.extend(facts.listens.iter().map(|l| judge_address(l, specific(l), facts)));
    if needs.wanted {
        let cpus = config.cpus.as_deref().unwrap_or_default();
        let far = far_cpus(&facts.devices, config.devices.as_deref(), cpus);
        found.extend(far.into_iter().map(|far| Finding::warn("cpus", far)));
    }
    let required = config.transport.encrypt == Encrypt::Required;
    let judge = |tls: Result<(), NoTls>| judge_tls(tls.map_err(|why| format!("{why}")), required);
    found.extend(facts.tls.map(judge));
    found
}

fn judge_address(listen: &Listen, ip: Option<IpAddr>, facts: &Facts) -> Finding {
    let address = &listen.address;
    if let Some(refused) = &listen.refused
        && refused.kind() != io::ErrorKind::AddrNotAvailable
    {
        let by = listen.taken_by.as_ref().map(|by| format!(" by {by}")).unwrap_or_default();
        let finding = Finding::fail("listen", format!("{address}: {refused}{by}"));
        return match refused.kind() {
            io::ErrorKind::AddrInUse => {
                finding.fix(format!("ss -ltnp 'sport = :{}'", address.port))
            }
            _ => finding,
        };
    }
    let Some(ip) = ip else { return Finding::ok("listen", address.to_string()) };
    if address.scheme == Scheme::Rdma {
        return judge_listen(ip, &facts.interfaces, &facts.devices);
    }
    let judged = judge_listen(ip, &facts.interfaces, &[]);
    match judged.verdict {
        Verdict::Fail => judged,
        _ => Finding::ok("listen", address.to_string()),
    }
}

/// Key files, and whether any host may connect.
pub(super) fn keys(facts: &Facts, config: &TargetConfig) -> Vec<Finding> {
    if config.authentication() == Auth::None {
        return vec![match config.exposed() {
            Some(address) => Finding::warn(
                "keys",
                format!("any host that reaches {address} may read and write every volume"),
            )
            .fix("rblk-target key new"),
            None => Finding::skip("keys", "only this host reaches the target"),
        }];
    }
    let judge = |(path, trouble): &(PathBuf, Option<Trouble>)| {
        let path = path.display();
        match trouble {
            Some(trouble) => failed("keys", format!("{path}: {}", trouble.why), trouble),
            None => Finding::ok("keys", format!("{path}, only its owner reads it")),
        }
    };
    let mut found: Vec<Finding> = facts.seen.keys.iter().map(judge).collect();
    found.push(match config.hosts.len() {
        0 => Finding::warn("hosts", NO_HOST.split(';').next().unwrap_or(NO_HOST))
            .fix("rblk-target host add NAME --key KEY --volume VOLUME:rw"),
        1 => Finding::ok("hosts", "1 may connect"),
        n => Finding::ok("hosts", format!("{n} may connect")),
    });
    found
}

/// The directories that the target writes to.
pub(super) fn files(facts: &Facts, config: &TargetConfig) -> Vec<Finding> {
    let (user, name) = &facts.user;
    let mut found = Vec::new();
    if let Some(state_dir) = &facts.state_dir {
        let fault = facts.running.as_ref().ok().and_then(|running| running.state_dir_fault.clone());
        found.push(match fault {
            Some(fault) => Finding::fail("state_dir", fault),
            None => state_dir.judge("state_dir", *user, name),
        });
    }
    // systemd makes the usual one (RuntimeDirectory=), and a target that runs has it.
    let is_usual = config.control_socket == Path::new(rblk_operate::target::flags::CONTROL_SOCKET);
    if facts.running.is_err() && !(is_usual && facts.systemd.file.is_some()) {
        found.push(facts.socket_dir.judge("run dir", *user, name));
    }
    found
}

/// The stores of the volumes.
pub(super) fn volumes(facts: &Facts) -> Vec<Finding> {
    if let Ok(running) = &facts.running {
        return served(running);
    }
    if facts.deaf.is_some() {
        return vec![Finding::skip("volumes", "a target serves them, and cannot be asked")];
    }
    let judge = |(volume, trouble): &(String, Option<Trouble>)| match trouble {
        None => Finding::ok("volumes", format!("{volume} can be served")),
        Some(trouble) => failed("volumes", format!("{volume}: {}", trouble.why), trouble),
    };
    facts.seen.stores.iter().map(judge).collect()
}

/// The volumes of a target that runs, as it sees their stores.
fn served(running: &TargetStatus) -> Vec<Finding> {
    let judge = |volume: &VolumeStatus| {
        let fault = volume.store_fault.as_ref()?;
        let finding = Finding::fail("volumes", format!("{}: {}", volume.name, fault.text));
        let advice = fault.advice.as_deref();
        let fix = advice.map(|advice| quoted(advice).unwrap_or(advice));
        Some(match fix {
            Some(fix) => finding.fix(fix),
            None => finding,
        })
    };
    let mut found: Vec<Finding> = running.volumes.iter().filter_map(judge).collect();
    let sound = running.volumes.len() - found.len();
    if sound > 0 || found.is_empty() {
        found.push(Finding::ok("volumes", format!("the running target serves {sound}")));
    }
    found
}

/// The first command that an error quotes.
fn quoted(error: &str) -> Option<&str> {
    error.split('`').nth(1)
}

/// The target that runs, or how to start it.
pub(super) fn running(facts: &Facts, config: Option<&Path>) -> Finding {
    let socket = facts.socket.display();
    let has_unit = facts.systemd.runs && facts.systemd.file.is_some();
    if let Some(pid) = facts.deaf {
        let found = format!("process {pid} serves, and its control socket {socket} was removed");
        return Finding::fail("target", found).fix(match has_unit {
            true => "systemctl restart rblk-target".to_owned(),
            false => format!("kill {pid}"),
        });
    }
    match &facts.running {
        Ok(status) => Finding::ok(
            "target",
            format!("{} runs, process {}, version {}", status.name, status.pid, status.version),
        ),
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {
            Finding::skip("target", format!("only root may ask at {socket}"))
        }
        Err(_) => {
            let fix = match (has_unit, config) {
                (true, _) => "systemctl start rblk-target".to_owned(),
                (false, Some(path)) => {
                    format!("rblk-target serve --config {}", Quoted(&path.to_string_lossy()))
                }
                (false, None) => "rblk-target serve --file NAME=PATH".to_owned(),
            };
            Finding::warn("target", format!("none answers at {socket}")).fix(fix)
        }
    }
}
