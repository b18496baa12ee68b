//! Whether another program can take over: its own report, and the conditions. Pure.

use std::net::SocketAddr;
use std::path::PathBuf;

use rblk_config::{CacheMode, StoreKind, TargetConfig, VolumeConfig};
use serde::{Deserialize, Serialize};

use super::FORMS;
use crate::memory::demand::Demand;

/// The flag of `serve` that makes a program print its [`Checked`], and end.
pub const CHECK_FLAG: &str = "--check-take-over";

/// The report of a program that was asked whether it can take over, with the arguments of the
/// running one: its configuration is valid, and its keys can be read.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Checked {
    /// Its version.
    pub version: String,
    /// The forms of a [`HandOver`](super::HandOver) that it reads: the oldest and the newest.
    pub hand_over_forms: [u32; 2],
    /// The name of its target.
    pub name: String,
    /// Its directory of records.
    pub state_dir: PathBuf,
    /// The path of its control socket.
    pub control_socket: PathBuf,
    /// The addresses that it would listen on.
    pub listen: Vec<String>,
    /// The deepest I/O queue that it would grant.
    pub queue_depth_max: u16,
    /// The most data of a command that it would grant, in bytes.
    pub io_max_bytes: u64,
    /// The RDMA devices that connections may come by; `None`: all.
    #[serde(default)]
    pub(crate) devices: Option<Vec<String>>,
    /// The address that it would serve metrics and the live page on.
    #[serde(default)]
    pub(crate) http: Option<SocketAddr>,
    /// The volumes that it would serve.
    pub volumes: Vec<CheckedVolume>,
    /// The configuration behind this report, in TOML, for the program itself. Not every version
    /// reports it.
    #[serde(default)]
    pub(crate) config: Option<String>,
    /// The memory that it would take. Not every version reports it.
    #[serde(default)]
    pub(crate) demand: Option<Demand>,
}

/// A volume that a program would serve.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct CheckedVolume {
    /// Its name.
    pub name: String,
    /// `file`, `rbd`, `memory` or `null`.
    pub store: String,
    /// Its file or device.
    #[serde(default)]
    pub path: Option<PathBuf>,
    /// Its image.
    #[serde(default)]
    pub image: Option<String>,
    /// Its block size in bytes.
    pub block_size: u32,
    /// Writes are acknowledged when they are in memory only.
    #[serde(default)]
    pub write_back: bool,
    /// Writes are refused.
    #[serde(default)]
    pub read_only: bool,
    /// The size that its configuration fixes, in bytes.
    #[serde(default)]
    pub size_bytes: Option<u64>,
}

impl From<&VolumeConfig> for CheckedVolume {
    fn from(volume: &VolumeConfig) -> Self {
        let store = match volume.store {
            StoreKind::File => "file",
            StoreKind::Rbd => "rbd",
            StoreKind::Memory => "memory",
            StoreKind::Null => "null",
        };
        Self {
            name: volume.name.clone(),
            store: store.to_owned(),
            path: volume.path.clone(),
            image: volume.image.clone(),
            block_size: volume.block_size,
            write_back: volume.cache == Some(CacheMode::WriteBack),
            read_only: volume.read_only,
            size_bytes: volume.size.map(|size| size.0),
        }
    }
}

impl Checked {
    /// The report of this program, with that configuration, name, addresses and memory.
    #[must_use]
    pub(crate) fn of_this_program(
        config: &TargetConfig,
        (name, listen): (String, Vec<String>),
        demand: Demand,
    ) -> Self {
        Self {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            hand_over_forms: FORMS,
            name,
            state_dir: config.state_dir.clone(),
            control_socket: config.control_socket.clone(),
            listen,
            queue_depth_max: config.queue_depth_max,
            io_max_bytes: config.max_io.0,
            devices: config.devices.clone(),
            http: config.http,
            volumes: config.volumes.iter().map(CheckedVolume::from).collect(),
            config: config.dump().ok(),
            demand: Some(demand),
        }
    }
}

/// Whether a program can take the place of the running one, so that mounts notice nothing but a
/// pause. It must serve the same volumes, and no more: a volume that cannot be opened, or an
/// address that is taken, would keep it from starting, and this program from serving again.
///
/// # Errors
/// The difference, and the remedy.
pub fn judge(served: &Checked, checked: &Checked) -> Result<(), String> {
    let [oldest, newest] = checked.hand_over_forms;
    if !(oldest..=newest).contains(&FORMS[1]) {
        return Err(format!(
            "version {} takes over from programs that hand over in form {oldest} to {newest}, and this one does so in \
             form {}: drain, install, start",
            checked.version, FORMS[1]
        ));
    }
    if checked.name != served.name {
        return Err(format!(
            "its target would be `{}`, and this one is `{}`: mounts would not take it for theirs. Set `name`",
            checked.name, served.name
        ));
    }
    judge_paths(served, checked)?;
    judge_grants(served, checked)?;
    served.volumes.iter().try_for_each(|volume| judge_volume(volume, &checked.volumes))?;
    let is_new = |its: &&CheckedVolume| served.volumes.iter().all(|ours| ours.name != its.name);
    let more = checked.volumes.iter().find(is_new);
    more.map_or(Ok(()), |more| {
        Err(format!(
            "it would also serve volume `{}`, which this target has not opened: run `rblk-target reload` first",
            more.name
        ))
    })
}

fn judge_paths(served: &Checked, checked: &Checked) -> Result<(), String> {
    let paths = [
        ("state_dir", &served.state_dir, &checked.state_dir),
        ("control_socket", &served.control_socket, &checked.control_socket),
    ];
    for (key, ours, its) in paths {
        if ours != its {
            return Err(format!(
                "its {key} would be {}, and this target's is {}: change the key with a drain and a start",
                its.display(),
                ours.display()
            ));
        }
    }
    if let Some(more) = checked.listen.iter().find(|address| !served.listen.contains(address)) {
        return Err(format!(
            "it would also listen on {more}, which this target has not tried: change `listen` with a drain and a \
             start"
        ));
    }
    let missing = served.listen.iter().find(|address| !checked.listen.contains(address));
    missing.map_or(Ok(()), |address| {
        Err(format!(
            "it would not listen on {address}, where mounts come back: change `listen` with a drain and a start"
        ))
    })
}

/// A mount was made with the running grants, and cannot go on with less.
fn judge_grants(served: &Checked, checked: &Checked) -> Result<(), String> {
    let grants = [
        ("queue_depth_max", u64::from(served.queue_depth_max), u64::from(checked.queue_depth_max)),
        ("max_io", served.io_max_bytes, checked.io_max_bytes),
    ];
    let less = grants.into_iter().find(|(_, ours, its)| its < ours);
    less.map_or(Ok(()), |(key, ours, its)| {
        Err(format!(
            "its {key} would be {its}, and this target's is {ours}: mounts that were made with more could not go on"
        ))
    })
}

fn judge_volume(volume: &CheckedVolume, others: &[CheckedVolume]) -> Result<(), String> {
    let name = &volume.name;
    let Some(its) = others.iter().find(|its| its.name == *name) else {
        return Err(format!(
            "it would not serve volume `{name}`: write the volume into the configuration, or remove it first \
             (`rblk-target volume remove {name}`)"
        ));
    };
    let place = |volume: &CheckedVolume| {
        (volume.store.clone(), volume.path.clone(), volume.image.clone(), volume.block_size)
    };
    if place(its) != place(volume) {
        return Err(format!(
            "it would serve volume `{name}` from another store, path, image or block size than now: put the configuration \
             right, or remove the volume first (`rblk-target volume remove {name}`)"
        ));
    }
    if its.write_back != volume.write_back {
        return Err(format!(
            "it would serve volume `{name}` with another cache mode than now, and mounts would take that for a loss: \
             change it first (`rblk-target volume set {name} --cache MODE --persist`)"
        ));
    }
    if its.read_only != volume.read_only {
        return Err(format!(
            "it would serve volume `{name}` {}, other than now: change it first (`rblk-target volume set {name} \
             --read-only={} --persist`)",
            if its.read_only { "read-only" } else { "for writing" },
            its.read_only
        ));
    }
    if its.size_bytes.is_some() && its.size_bytes != volume.size_bytes {
        return Err(format!(
            "its configuration gives volume `{name}` another size than it has now: run `rblk-target reload` first"
        ));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn volume(name: &str) -> CheckedVolume {
        CheckedVolume {
            name: name.to_owned(),
            store: "file".to_owned(),
            path: Some(format!("/srv/{name}").into()),
            image: None,
            block_size: 4096,
            write_back: false,
            read_only: false,
            size_bytes: None,
        }
    }

    fn pair() -> (Checked, Checked) {
        let served = Checked {
            version: "9.9".to_owned(),
            hand_over_forms: FORMS,
            name: "store1".to_owned(),
            state_dir: "/var/lib/rblk".into(),
            control_socket: "/run/rblk/c.sock".into(),
            listen: vec!["tcp://[::]:7721".to_owned()],
            queue_depth_max: 128,
            io_max_bytes: 1 << 20,
            devices: None,
            http: None,
            volumes: vec![volume("a"), volume("b")],
            config: None,
            demand: None,
        };
        (served.clone(), served)
    }

    #[test]
    fn a_program_that_would_serve_the_same_can_take_over() {
        let (served, mut checked) = pair();
        assert_eq!(judge(&served, &checked), Ok(()));
        checked.hand_over_forms = [1, 7];
        checked.io_max_bytes *= 2;
        assert_eq!(judge(&served, &checked), Ok(()), "more is no fault");
    }

    #[test]
    fn a_program_that_mounts_would_not_accept_is_refused() {
        type Fault = fn(&mut Checked);
        let faults: [(Fault, &str); 18] = [
            (|c| c.hand_over_forms = [3, 4], "drain, install, start"),
            // The version before this one.
            (|c| c.hand_over_forms = [1, 1], "form 1 to 1, and this one does so in form 2"),
            (|c| c.hand_over_forms = [0, 0], "form 0 to 0"),
            (|c| c.name = "other".to_owned(), "its target would be `other`"),
            (|c| c.state_dir = "/tmp".into(), "its state_dir would be /tmp"),
            (|c| c.control_socket = "/c".into(), "its control_socket would be /c"),
            (|c| c.listen.clear(), "not listen on tcp://[::]:7721"),
            (|c| c.queue_depth_max = 64, "its queue_depth_max would be 64"),
            (|c| c.io_max_bytes = 4096, "its max_io would be 4096"),
            (|c| drop(c.volumes.remove(0)), "would not serve volume `a`"),
            (|c| c.volumes[1].path = None, "volume `b` from another store"),
            (|c| c.volumes[1].block_size = 512, "volume `b` from another store"),
            (|c| c.volumes[1].image = Some("rbd/b".to_owned()), "volume `b` from another store"),
            (|c| c.volumes[1].write_back = true, "another cache mode"),
            (|c| c.volumes[1].read_only = true, "`b` read-only, other than now"),
            (|c| c.volumes[1].size_bytes = Some(4096), "volume `b` another size"),
            (|c| c.volumes.push(volume("more")), "also serve volume `more`"),
            (|c| c.listen.push("tcp://[::]:1".to_owned()), "also listen on tcp://[::]:1"),
        ];
        for (fault, why) in faults {
            let (served, mut checked) = pair();
            fault(&mut checked);
            let error = judge(&served, &checked).unwrap_err();
            assert!(error.contains(why), "{error}");
        }
    }

    #[test]
    fn the_report_of_a_later_version_is_understood() {
        let (_, checked) = pair();
        let mut json = serde_json::to_value(&checked).unwrap();
        json["more"] = 1.into();
        json["volumes"][0]["more"] = 1.into();
        assert_eq!(serde_json::from_value::<Checked>(json).unwrap(), checked);
    }
}
