//! `rblk-initiator doctor`: the obstacles that keep this host from mounting, each with the command
//! that removes it.
//!
//! `facts` reads the host and `peer` its targets; `judge` makes findings of them and does no I/O.
//! This program links no RDMA library, so `rblk-initiatord` tries the connection: it prints a
//! [`Probe`].

mod facts;
mod judge;
mod peer;

use std::path::{Path, PathBuf};
use std::process::Command;

use rblk_config::{Encrypt, MountConfig};
use rblk_fabric::{Address, Scheme};
use rblk_operate::doctor::{Finding, Needs, Report, judge_rdma};

use facts::Facts;
use peer::Peer;
use rblk_operate::mount::flags::DoctorArgs;
use rblk_operate::mount::probe_result::{Probe, ProbeError};

/// Looks at this host and at the way to its targets. `daemon` is the `rblk-initiatord` that tries
/// the connections.
///
/// # Errors
/// An invalid address.
pub fn doctor(args: &DoctorArgs, daemon: &Path) -> anyhow::Result<Report> {
    let mut report = Report::default();
    let config = match configuration(args) {
        Ok(config) => config,
        Err(error) => {
            report.add([Finding::fail("config", error.to_string())]);
            MountConfig::default()
        }
    };
    let addresses = match args.address.is_empty() {
        true => config.target.clone(),
        false => args.address.clone(),
    };
    let addresses = addresses.iter().map(|a| a.parse()).collect::<Result<Vec<Address>, _>>()?;
    let facts = Facts::read(Path::new("/"), &config);
    let rdma = addresses.iter().any(|a| a.scheme == Scheme::Rdma);
    let host = judge::host(&facts, &config, rdma || addresses.is_empty());
    let memlock = host.iter().find(|finding| finding.subject == "memlock").cloned();
    report.add(host);

    let peers: Vec<Peer> = addresses.iter().map(|a| Peer::look_up(a, args.timeout.get())).collect();
    let over_rdma = peers.iter().filter(|peer| peer.address.scheme == Scheme::Rdma);
    let sources = over_rdma.filter_map(|peer| peer.route.as_ref()?.source(&facts.interfaces));
    let needs = Needs { wanted: rdma, addresses: sources.collect() };
    let ports = judge_rdma(&facts.devices, &facts.interfaces, &needs);
    report.add(ports.clone());
    let key = judge::key_file(&facts, &config);
    report.add([key.clone()]);
    let tcp = addresses.iter().any(|a| a.scheme == Scheme::Tcp);
    report.add(judge::encryption(&config, tcp));
    for peer in &peers {
        let way = judge::way(peer, &facts);
        let blocked =
            way.iter().chain(&ports).chain(&memlock).chain([&key]).find_map(judge::blocks);
        report.add(way);
        report.add(match blocked {
            Some(what) => vec![Finding::skip("connect", format!("needs {what}"))],
            None => {
                let wish = Wish { daemon, args, config: &config };
                let found = wish.try_connection(&peer.address);
                let elsewhere = judge::may_be_elsewhere(&found, &peer.address).filter(|usual| {
                    !matches!(
                        wish.try_connection(usual),
                        Probe::Failed { error: ProbeError::Refused, .. }
                    )
                });
                judge::connection(&found, peer, &facts, &config, elsewhere.as_ref())
            }
        });
    }
    report.add(judge::paths(&peers, &facts, &config));
    report.add(judge::mounts(&facts));
    Ok(report)
}

/// The configuration to mount: from the file and the flags.
fn configuration(args: &DoctorArgs) -> Result<MountConfig, rblk_config::ConfigError> {
    let config = match &args.config {
        Some(path) => MountConfig::load(path)?,
        None => MountConfig::default(),
    };
    args.keys.over(&config)
}

/// The parameters of a connection's try.
struct Wish<'a> {
    daemon: &'a Path,
    args: &'a DoctorArgs,
    config: &'a MountConfig,
}

impl Wish<'_> {
    /// Has the daemon try one connection.
    fn try_connection(&self, address: &Address) -> Probe {
        let mut command = Command::new(self.daemon);
        command.args(["doctor", "--probe", &address.to_string()]);
        command.args(["--timeout", &self.args.timeout.to_string()]);
        if !self.config.volume.is_empty() {
            command.args(["--read", &self.config.volume]);
        }
        command.args(["--read-bytes", &self.config.max_io.0.to_string()]);
        if !self.config.target_keys.is_empty() {
            for key in &self.config.target_keys {
                command.args(["--target-key", &key.to_string()]);
            }
            command.arg("--key-file").arg(&self.config.key_file);
        }
        if self.config.transport.encrypt != Encrypt::Auto {
            command.args(["--encrypt", &self.config.transport.encrypt.to_string()]);
        }
        match command.output() {
            Err(error) => Probe::other(format!("cannot run {}: {error}", self.daemon.display())),
            Ok(output) => serde_json::from_slice(&output.stdout).unwrap_or_else(|_| {
                let said = String::from_utf8_lossy(&output.stderr);
                let said = said.lines().last().unwrap_or("nothing").to_owned();
                Probe::other(format!("rblk-initiatord ended with {}: {said}", output.status))
            }),
        }
    }
}

/// The files of mounts, for the units that start them.
pub(crate) fn mounts_of(root: &Path) -> Vec<String> {
    let Ok(dir) = std::fs::read_dir(root.join("etc/rblk/mounts.d")) else { return Vec::new() };
    let names = dir.flatten().filter_map(|entry| {
        let path = PathBuf::from(entry.file_name());
        let is_file = path.extension().is_some_and(|extension| extension == "toml");
        path.file_stem().filter(|_| is_file)?.to_str().map(str::to_owned)
    });
    let mut names: Vec<String> = names.collect();
    names.sort();
    names
}
