//! The state of the mounts of a host as metrics, for node_exporter's textfile collector. Pure.
//!
//! Counters begin at 0 with each process of a mount.

use rblk_operate::exposition::{Exposition, Kind, Labeled, Scale};

use rblk_operate::mount::mount_status::MountStatus;

/// The states of a mount: the values of [`MountStatus::state`], and of `Condition::word` for dead
/// mounts.
const STATES: [&str; 12] = [
    "waiting",
    "connected",
    "reconnecting",
    "failing",
    "fenced",
    "volume lost",
    "volume removed",
    "no server",
    "ending",
    "no answer",
    "bad note",
    "dead",
];

/// The reason why only the name of a mount is known.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Silence {
    /// The process lives and does not answer.
    NoAnswer,
    /// The process died, and the note cannot be read.
    BadNote,
    /// The process died, and the driver did not report the state of the device.
    Dead,
}

impl Silence {
    fn state(self) -> &'static str {
        match self {
            Self::NoAnswer => "no answer",
            Self::BadNote => "bad note",
            Self::Dead => "dead",
        }
    }
}

/// A mount with only its name known. Its state is its only metric.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct SilentMount {
    /// The name.
    pub name: String,
    /// The reason.
    pub silence: Silence,
}

/// A number of a mount, with the name of its metric and its help.
type OfMount = (&'static str, Kind, &'static str, fn(&MountStatus) -> u64);

const MOUNTS: &[OfMount] = &[
    ("rblk_mount_size_bytes", Kind::Gauge, "Size of the disk.", |m| m.size_bytes),
    ("rblk_mount_queues", Kind::Gauge, "Hardware queues of the disk.", |m| m.queues.into()),
    (
        "rblk_mount_unflushed_writes",
        Kind::Gauge,
        "Acknowledged writes that no FLUSH covered.",
        |m| m.unflushed_writes,
    ),
    (
        "rblk_mount_fallback",
        Kind::Gauge,
        "1 while an address is in use that stands after a better one, else 0.",
        |m| m.fallback.is_some().into(),
    ),
    (
        "rblk_mount_losses_total",
        Kind::Counter,
        "Times acknowledged writes may have been lost.",
        |m| m.losses,
    ),
    (
        "rblk_mount_loss_untold",
        Kind::Gauge,
        "1 while a loss is still to be told by a FLUSH, else 0.",
        |m| m.loss_untold.into(),
    ),
    (
        "rblk_mount_writes_rewritten_total",
        Kind::Counter,
        "Acknowledged writes that were written again after the target came back.",
        |m| m.writes_rewritten,
    ),
    (
        "rblk_mount_recoveries_total",
        Kind::Counter,
        "Times a new process took the device over.",
        |m| m.recovered.into(),
    ),
];

/// The metrics of mounts. A silent mount has a metric, too, so that an alert can distinguish it
/// from an unmounted one.
#[must_use]
pub fn metrics(mounts: &[MountStatus], silent: &[SilentMount]) -> String {
    let mut all = Exposition::default();
    of_identity(&mut all, mounts);
    of_state(&mut all, mounts, silent);
    of_time(&mut all, mounts);
    of_paths(&mut all, mounts);
    for (name, kind, help, value) in MOUNTS {
        let mut family = all.family(name, *kind, help);
        for m in mounts {
            family.sample(&[("mount", &m.name)], value(m));
        }
    }
    let labels = |m: &MountStatus| vec![("mount", m.name.clone())];
    let totals: Vec<Labeled<'_, _>> = mounts.iter().map(|m| (labels(m), &m.total)).collect();
    all.counters("", &totals);
    of_latency(&mut all, mounts);
    all.into_text()
}

fn of_identity(all: &mut Exposition, mounts: &[MountStatus]) {
    let mut family = all.family("rblk_mount_info", Kind::Gauge, "The mounts; always 1.");
    for m in mounts {
        family.sample(
            &[
                ("mount", &m.name),
                ("device", &m.device),
                ("volume", &m.volume),
                ("target", &m.target_name),
                ("address", &m.address),
                ("transport", &m.transport),
                ("version", &m.version),
            ],
            1,
        );
    }
}

fn of_state(all: &mut Exposition, mounts: &[MountStatus], silent: &[SilentMount]) {
    let help = "1 for the state that the mount is in, 0 for the others.";
    let mut family = all.family("rblk_mount_state", Kind::Gauge, help);
    for m in mounts {
        let others = STATES.iter().copied().filter(|state| *state != m.state);
        for state in others {
            family.sample(&[("mount", &m.name), ("state", state)], 0);
        }
        if !m.state.is_empty() {
            family.sample(&[("mount", &m.name), ("state", &m.state)], 1);
        }
    }
    for m in silent {
        family.sample(&[("mount", &m.name), ("state", m.silence.state())], 1);
    }
}

fn of_time(all: &mut Exposition, mounts: &[MountStatus]) {
    let help = "For how long the target has been lost; 0 while it is there.";
    let mut family = all.family("rblk_mount_target_lost_seconds", Kind::Gauge, help);
    for m in mounts {
        family.sample(&[("mount", &m.name)], seconds(m.lost_ms_ago.unwrap_or(0)));
    }
    let help = "The longest time without the target so far.";
    let mut family = all.family("rblk_mount_stall_max_seconds", Kind::Gauge, help);
    for m in mounts {
        family.sample(&[("mount", &m.name)], seconds(m.stall_ms_max));
    }
}

fn of_paths(all: &mut Exposition, mounts: &[MountStatus]) {
    let paths = || mounts.iter().flat_map(|m| m.paths.iter().map(move |path| (m, path)));
    let help = "1 while a path of a mount with paths = \"all\" is in use, else 0.";
    let mut family = all.family("rblk_mount_path_up", Kind::Gauge, help);
    for (m, path) in paths() {
        let labels = &[("mount", m.name.as_str()), ("address", &path.address)];
        family.sample(labels, u64::from(path.is_in_use()));
    }
    let help = "Times a path of a mount with paths = \"all\" was lost.";
    let mut family = all.family("rblk_mount_path_losses_total", Kind::Counter, help);
    for (m, path) in paths() {
        let labels = &[("mount", m.name.as_str()), ("address", &path.address)];
        family.sample(labels, path.lost);
    }
    let help = "Bytes sent by a path of a mount with paths = \"all\", by operation.";
    let mut family = all.family("rblk_mount_path_bytes_total", Kind::Counter, help);
    for (m, path) in paths() {
        for (op, bytes) in [("read", path.work.read_bytes), ("write", path.work.written_bytes)] {
            let labels = [("mount", m.name.as_str()), ("address", &path.address), ("op", op)];
            family.sample(&labels, bytes);
        }
    }
}

fn of_latency(all: &mut Exposition, mounts: &[MountStatus]) {
    let help = "Time from the driver and back to it.";
    let mut family = all.family("rblk_mount_latency_seconds", Kind::Histogram, help);
    for m in mounts {
        for (op, times) in m.latency.kinds() {
            family.latency(&[("mount", &m.name), ("op", op)], &times.total, Scale::Fine);
        }
    }
    let help = "Time of requests by stage: queue (this end) and target (the wire and the target).";
    let mut family = all.family("rblk_mount_stage_seconds", Kind::Histogram, help);
    for m in mounts {
        for (op, times) in m.latency.kinds() {
            for (stage, counts) in times.stages() {
                let labels = &[("mount", m.name.as_str()), ("op", op), ("stage", stage)];
                family.latency(labels, counts, Scale::Coarse);
            }
        }
    }
}

#[allow(clippy::cast_precision_loss, reason = "53 bits of milliseconds do not end")]
fn seconds(ms: u64) -> f64 {
    ms as f64 / 1000.0
}

#[cfg(test)]
mod tests {
    use rblk_operate::mount::path_status::PathStatus;

    use super::*;

    #[test]
    fn a_mount_is_in_one_state() {
        let mount = |name: &str, state: &str| MountStatus {
            name: name.to_owned(),
            state: state.to_owned(),
            lost_ms_ago: Some(1500),
            ..MountStatus::default()
        };
        let text = metrics(&[mount("a", "reconnecting"), mount("b", "odd")], &[]);
        let states = |name: &str, value: u8| -> Vec<&str> {
            let is_it = |line: &&str| {
                line.starts_with(&format!("rblk_mount_state{{mount=\"{name}\""))
                    && line.ends_with(&format!("}} {value}"))
            };
            text.lines().filter(is_it).collect()
        };
        assert_eq!(states("a", 1), ["rblk_mount_state{mount=\"a\",state=\"reconnecting\"} 1"]);
        assert_eq!(states("a", 0).len(), STATES.len() - 1);
        assert_eq!(
            states("b", 1),
            ["rblk_mount_state{mount=\"b\",state=\"odd\"} 1"],
            "one of a later version"
        );
        assert!(text.contains("rblk_mount_target_lost_seconds{mount=\"a\"} 1.5\n"), "{text}");
        assert!(
            metrics(&[], &[]).contains("# TYPE rblk_mount_info gauge\n"),
            "families without samples"
        );
    }

    #[test]
    fn each_path_of_a_mount_has_its_state() {
        let path = |address: &str, state: &str, lost| PathStatus {
            address: address.to_owned(),
            state: state.to_owned(),
            lost,
            ..PathStatus::default()
        };
        let paths = vec![path("rdma://a", "in use", 0), path("rdma://b", "probed", 3)];
        let name = "m".to_owned();
        let text = metrics(&[MountStatus { name, paths, ..MountStatus::default() }], &[]);
        for line in [
            "rblk_mount_path_up{mount=\"m\",address=\"rdma://a\"} 1\n",
            "rblk_mount_path_up{mount=\"m\",address=\"rdma://b\"} 0\n",
            "rblk_mount_path_losses_total{mount=\"m\",address=\"rdma://b\"} 3\n",
            "rblk_mount_path_bytes_total{mount=\"m\",address=\"rdma://b\",op=\"read\"} 0\n",
        ] {
            assert!(text.contains(line), "{line}: {text}");
        }
    }

    #[test]
    fn a_mount_that_says_nothing_has_its_state_and_nothing_else() {
        let silent = |name: &str, silence| SilentMount { name: name.to_owned(), silence };
        let text = metrics(&[], &[silent("a", Silence::NoAnswer), silent("b", Silence::BadNote)]);
        let samples: Vec<&str> = text.lines().filter(|line| !line.starts_with('#')).collect();
        assert_eq!(
            samples,
            [
                "rblk_mount_state{mount=\"a\",state=\"no answer\"} 1",
                "rblk_mount_state{mount=\"b\",state=\"bad note\"} 1",
            ]
        );
        for silence in [Silence::NoAnswer, Silence::BadNote, Silence::Dead] {
            assert!(STATES.contains(&silence.state()), "{silence:?}");
        }
    }
}
