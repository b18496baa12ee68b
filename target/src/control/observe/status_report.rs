//! The status of a target, as control knows it.

use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use rblk_config::Auth;
use rblk_fabric::{Device, PageKind};
use rblk_protocol::AccessMode;
use rblk_protocol::width::{narrow, wide64};

use crate::control::Control;
use crate::control::core::{Core, DrainState};
use crate::control::peers::session::{Leave, Session};
use crate::pool::opening::AwayVolume;
use crate::volume::{Placement, Volume};
use rblk_operate::target::delays::DelayCounts;
use rblk_operate::target::group_counts::StatsSnapshot;
use rblk_operate::target::status::{
    AwayStatus, DeviceStatus, DrainStatus, HolderStatus, SessionStatus, TargetStatus, UsageStatus,
    VolumeStatus,
};
use rblk_operate::target::store_fault::StoreFaultKind;
use rblk_operate::target::traffic::{IoCounts, VolumeTimes};
use rblk_operate::target::volume_counts::{LastError, VolumeCounts};

/// The state of a target now, without the conclusions of `summary.rs`.
pub(crate) fn of(control: &Control) -> TargetStatus {
    let Control { description, core, groups, reception, .. } = control;
    let devices = reception.devices();
    let poll_groups: Vec<StatsSnapshot> = groups.iter().map(|g| g.stats.snapshot()).collect();
    let mut total = StatsSnapshot::default();
    poll_groups.iter().for_each(|group| total.add(group));
    let (decisions, encryption) = (core.decisions(), core.encryption());
    let is_encrypted = |s: &Session| encryption.get(&s.index).copied().unwrap_or(false);
    TargetStatus {
        name: description.name.to_string(),
        version: env!("CARGO_PKG_VERSION").to_owned(),
        pid: std::process::id(),
        instance: description.instance.to_string(),
        uptime_s: description.started.elapsed().as_secs(),
        started_unix_ms: unix_ms().saturating_sub(millis(description.started.elapsed())),
        condition: String::new(),
        warnings: Vec::new(),
        usage: UsageStatus::default(),
        draining: core.is_draining() || control.claims.leaving(Instant::now()).is_some(),
        drain: drain_of(control, Instant::now()).map(|drain| DrainStatus {
            upgrade: core.is_upgrading(),
            lasted_ms: millis(drain.lasted),
            left_ms: millis(drain.left),
            sessions: drain.sessions,
            stores_ms: millis(description.stop_timeout),
            unsaved: control.ends.refused_status(core),
        }),
        upgrade: control.upgrades.status(),
        lease_ms: millis(description.lease),
        fencings: decisions.take_overs + decisions.refused_returns,
        auth: if core.requires_proof() { Auth::Required } else { Auth::None }.word().to_owned(),
        insecure: description.insecure,
        strangers: core.strangers(),
        unproven: decisions.unproven,
        take_overs: decisions.take_overs,
        listen: description.listening.clone(),
        listen_down: {
            let outages = &description.outages;
            description.listening.iter().filter_map(|address| outages.of(address)).collect()
        },
        state_dir_fault: control.watch.state_fault().map(str::to_owned),
        arena_bytes: wide64(devices.arena().len()),
        arena_page_bytes: match devices.arena().kind() {
            PageKind::Normal => 4096,
            PageKind::Huge2MiB => 2 << 20,
        },
        devices: devices.iter().map(|d| device(control, d)).collect(),
        volumes_away: away(control),
        volumes: core.volumes().iter().map(|v| volume(control, v)).collect(),
        sessions: core.sessions().iter().map(|s| session(control, s, is_encrypted(s))).collect(),
        rates: control.rates.of_all(),
        total,
        poll_groups,
        events: control.events.events().totals(),
    }
}

/// How far the end of the target is. A member of a group first hands its volumes over.
fn drain_of(control: &Control, now: Instant) -> Option<DrainState> {
    let begun = control.core.drain_state(now);
    begun.or_else(|| Some(control.core.drain_ahead(control.claims.leaving(now)?)))
}

fn device(control: &Control, device: &Device) -> DeviceStatus {
    let caps = device.caps();
    let io = control.reception.tally().device(&caps.name);
    let ports = control.watch.ports_of(&caps.name);
    DeviceStatus { name: caps.name.clone(), transport: caps.transport.to_string(), io, ports }
}

fn volume(control: &Control, v: &Volume) -> VolumeStatus {
    let (mut counts, mut last_error) = (VolumeCounts::default(), LastError::default());
    let (mut io, mut latency) = (IoCounts::default(), VolumeTimes::default());
    let mut delays = DelayCounts::default();
    let mut dirty_ms = None;
    // The shards started counting a moment earlier.
    let age = control.description.started.elapsed();
    let now_ms: u32 = narrow(millis(age) & u64::from(u32::MAX));
    for stats in control.groups.iter().filter_map(|g| g.volume_stats(v.index)) {
        counts.add(&stats.snapshot());
        last_error = last_error.max(stats.last_error());
        io.add(&stats.io());
        delays.add(&stats.delays());
        latency.add(&stats.times());
        dirty_ms = dirty_ms.max(stats.dirty_since().age_ms(now_ms));
    }
    let is_on_image = control.volumes.backing(v.index).is_some_and(|store| store.image().is_some());
    VolumeStatus {
        name: v.name.to_string(),
        store: match v.placement {
            Placement::Store if is_on_image => "rbd",
            Placement::Store => "file",
            Placement::Memory(_) => "memory",
            Placement::Null => "null",
        }
        .to_owned(),
        size_bytes: v.blocks.bytes(v.block_size).unwrap_or(0),
        block_size: v.block_size.bytes(),
        read_only: v.read_only,
        volatile_cache: v.has_volatile_cache(),
        cache: v.cache,
        cache_min_bytes: v.cache_min_bytes,
        cache_max_bytes: v.cache_max_bytes,
        counts,
        io,
        limits: v.limits.as_ref().map(|limiter| limiter.limits()).unwrap_or_default(),
        delays,
        latency,
        rates: control.rates.of(v.index),
        last_errno: last_error.errno(),
        last_error_age_s: last_error.age_s(age.as_secs()),
        dirty_age_s: dirty_ms.map(|ms| u64::from(ms) / 1000),
        room: control.watch.room_of(v.index).cloned(),
        store_fault: control.watch.fault_of(v.index).cloned().filter(|fault| {
            // A volume that refuses writes itself does not need a writable store.
            !v.read_only || fault.kind != StoreFaultKind::ReadOnly
        }),
        generation: control.core.generation(v.index).0,
        holder: holder(&control.core, v),
        in_use: control.core.sessions().is_open(v.index),
        notes: control.volumes.notes(v.name.as_str()),
    }
}

// Without volumes that were added since.
fn away(control: &Control) -> Vec<AwayStatus> {
    let is_served =
        |name: &str| control.core.volumes().iter().any(|volume| volume.name.as_str() == name);
    let away = control.description.away.iter().filter(|away| !is_served(&away.name));
    let told = |AwayVolume { name, why, elsewhere, handed_over }: &AwayVolume| AwayStatus {
        name: name.clone(),
        why: why.clone(),
        elsewhere: *elsewhere,
        handed_over: *handed_over,
    };
    away.map(told).collect()
}

fn holder(core: &Core, v: &Volume) -> Option<HolderStatus> {
    if let Some(session) = core.sessions().writer(v.index) {
        return Some(HolderStatus {
            host: session.host_name.to_string(),
            shared: session.mode_of(v.index) == Some(AccessMode::Shared),
            present: session.connections() > 0,
        });
    }
    let record = core.holders().record(&v.uuid).filter(|_| core.is_kept(v.index))?;
    Some(HolderStatus {
        host: record.host_name.to_string(),
        shared: record.mode == AccessMode::Shared,
        present: false,
    })
}

fn session(control: &Control, session: &Session, encrypted: bool) -> SessionStatus {
    let core = &control.core;
    let (io, queues) = control.reception.tally().session(session.index);
    let name_of = |index| {
        let volume = core.volumes().iter().find(|v| v.index == index);
        volume.map_or_else(String::new, |v| v.name.to_string())
    };
    SessionStatus {
        host: session.host_name.to_string(),
        peer: session.peer.clone(),
        key: core.key_of(session.index).map(|key| key.to_string()),
        encrypted,
        number: session.index.life,
        place: session.place,
        epoch: session.newest.0,
        connections: session.connections(),
        volumes: session.opened().map(|(volume, _)| name_of(volume)).collect(),
        digest: session.digest,
        fenced: session.leave() == Some(Leave::Fenced),
        io,
        queues,
    }
}

pub(crate) fn unix_ms() -> u64 {
    millis(SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default())
}

pub(crate) fn millis(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}
