//! Control without poll groups.

use rblk_config::VolumeConfig;
use rblk_fabric::soft::network::Network;
use rblk_fabric::{
    AcceptParams, Access, Connection, ConnectionHello, Device, PageKind, PollerHandle,
    ProtectionDomain, QpLimits,
};
use rblk_protocol::limits::{ADMIN_DEPTH, IN_CAPSULE_DEFAULT_BYTES};
use rblk_protocol::{
    ConnectionKind, Epoch, Features, HelloRequest, QueueDepth, SessionId, Version,
};

use rblk_runtime::spin::SpinMode;

use super::connect::destroy::Destroyed;
use super::connect::reception::ReceptionNews;
use super::core::Knock;
use super::*;
use crate::cache::{Shard, ShardOptions, Unsaved};
use crate::data::connection::{ConnectionMemory, ConnectionParams, Layout, progress_max};
use crate::data::poll_group::group_thread::{POLLERS_MAX, Tuning};
use crate::data::poll_group::other_groups::OtherGroups;
use crate::data::poll_group::{PollerMemory, group_thread};
use crate::memory::arena::Arena;
use crate::store::uring::{UringOptions, UringStore};
use crate::volume::ids::{ConnectionId, VolumeIndex};
use crate::volume::tests::stored_block;
use rblk_operate::target::events::EventKind;

fn control(state: StateDirectory) -> anyhow::Result<Control> {
    control_of(state, Vec::new(), Vec::new())
}

fn control_over(
    state: StateDirectory,
    stores: Vec<(VolumeUuid, Option<StoreIdentity>)>,
) -> anyhow::Result<Control> {
    control_of(state, Vec::new(), stores)
}

fn control_of(
    state: StateDirectory,
    groups: Vec<GroupHandle>,
    stores: Vec<(VolumeUuid, Option<StoreIdentity>)>,
) -> anyhow::Result<Control> {
    let region = || Region::allocate(4096, PageKind::Normal).unwrap();
    Control::new(ControlParts {
        name: Name::new("t").unwrap(),
        instance: InstanceId([9; 16]),
        state,
        limits: ConnectionLimits {
            queue_depth_max: 16,
            in_capsule_bytes: 4096,
            io_max_bytes: 1 << 20,
            capacity: Capacity::new(4, None, 1 << 30),
            lease: Duration::from_secs(30),
            encrypt: Encrypt::Auto,
        },
        groups,
        arena: region(),
        zeros: region(),
        volumes: vec![stored_block()],
        stores,
        volume_notes: HashMap::new(),
        listening: Vec::new(),
        outages: Outages::default(),
        away: Vec::new(),
        others: Vec::new(),
        drain_timeout: Duration::from_secs(1),
        stop_timeout: Duration::from_secs(30),
        auth: None,
        insecure: false,
        running: TargetConfig::default(),
        backings: HashMap::new(),
        places: 8,
        took_over: None,
    })
}

fn hello() -> HelloRequest {
    HelloRequest {
        kind: ConnectionKind::Admin,
        newest: Version::NEWEST,
        oldest: Version::OLDEST,
        depth: QueueDepth::new(16).unwrap(),
        features: Features::default(),
        in_capsule_bytes: 4096,
        io_max_bytes: 1 << 20,
        epoch: Epoch(0),
        reads_in: 0,
        session: SessionId::default(),
    }
}

#[tokio::test]
async fn a_connection_that_no_poll_group_takes_is_not_waited_for() {
    let mut control = control(StateDirectory::nothing()).unwrap();
    let knock = Knock {
        asked: &hello(),
        introduction: None,
        peer: "peer",
        memory_bytes: 1,
        fresh: SessionId([7; 16]),
        is_encrypted: false,
        has_ways: false,
    };
    let admitted = control.core.connect(&knock, Instant::now()).expect("there is room");
    let network = Network::new(1);
    let device = Device::Soft(network.device());
    let pd = device.alloc_pd().unwrap();
    let (_poller, handle) = pd.poller(64).unwrap();
    #[allow(irrefutable_let_patterns, reason = "verbs may be built in or not")]
    let PollerHandle::Soft(handle) = handle else { panic!("another provider") };
    let depth = QueueDepth::new(ADMIN_DEPTH).unwrap();
    let layout = Layout::new(depth, IN_CAPSULE_DEFAULT_BYTES, true);
    let sizes = QpLimits {
        send_wrs: layout.send_wrs(),
        recv_wrs: layout.recv_wrs(),
        send_sges: 1,
        recv_sges: 1,
        inline_bytes: 64,
        reads_out: 1,
        reads_in: 1,
    };
    let (near, _far, _wire) = network.pair((&handle, sizes), (&handle, sizes)).unwrap();
    let memory = ConnectionMemory::allocate(&pd, layout).unwrap();
    let region = Arc::clone(memory.region());
    let params = ConnectionParams {
        kind: ConnectionKind::Admin,
        admission: admitted.id,
        session: admitted.session,
        epoch: admitted.epoch,
        proof: None,
        in_capsule_bytes: 4096,
        io_max_bytes: 1 << 20,
        features: Features::default(),
        reads_out: 1,
        send_sges: 1,
        landing_slots: 0,
        memory,
        spares: None,
        bounce: None,
        progress_max: progress_max(None),
        io: Arc::default(),
        peer: "peer".to_owned(),
    };
    let accept = AcceptParams { hello: ConnectionHello(Vec::new()), reads_out: 1, reads_in: 1 };
    let params = Box::new(params);
    let connection = Connection::Soft(near);
    let Control { reception, core, groups, .. } = &mut control;
    let mail = ToGroup::AddConnection { poller: 0, connection, params, accept };
    reception.hand_over(0, mail, groups);
    assert_eq!(core.strangers(), 1);
    let destroyed = reception.next().await.expect("it is over");
    assert_eq!(Arc::strong_count(&region), 1, "and was freed before");
    reception.on_news(destroyed, core, groups);
    assert_eq!(control.core.strangers(), 0);
}

/// Poll groups that have ended: control sends them mail, and no thread takes it.
fn ended_groups() -> Vec<GroupHandle> {
    let others = OtherGroups::connect(2).unwrap().into_iter().enumerate();
    let mut groups: Vec<GroupHandle> = others
        .map(|(index, others)| {
            let arena = Region::allocate(1 << 20, PageKind::Normal).unwrap();
            let store = UringStore::new(Arc::clone(&arena), &UringOptions::default()).unwrap();
            let part = Arena::over(Arc::clone(&arena), 0..1 << 20, 64 << 10).unwrap();
            let options = ShardOptions {
                dirty_max_bytes: 0,
                write_back_delay: Duration::ZERO,
                write_back_max_bytes: 64 << 10,
                seed: 1,
            };
            let shard = Shard::new(store, part, options, Instant::now());
            let tuning = Tuning {
                cpu: None,
                spin: SpinMode::Never,
                slow_io: None,
                stop_timeout: Duration::ZERO,
            };
            let (to_control, _) = mpsc::unbounded_channel();
            let handle = group_thread::start(index, shard, others, tuning, to_control).unwrap();
            handle.mail.send(ToGroup::Stop).unwrap();
            handle
        })
        .collect();
    groups.iter_mut().for_each(GroupHandle::join);
    groups
}

fn place(control: &mut Control, device: &Device) -> rblk_fabric::Result<usize> {
    control.reception.devices_mut().place(device, &mut control.groups)
}

fn cq(
    control: &mut Control,
    place: usize,
    group: usize,
) -> Result<(ProtectionDomain, PollerHandle), String> {
    control.reception.devices_mut().poller(place, group, &mut control.groups)
}

#[test]
fn a_broken_completion_queue_is_made_anew_when_its_place_is_empty() {
    let groups = ended_groups();
    let mut control = control_of(StateDirectory::nothing(), groups, Vec::new()).unwrap();
    let networks = [1, 2].map(Network::new);
    let [one, other] = networks.map(|network| Device::Soft(network.device()));
    assert_eq!((place(&mut control, &one).unwrap(), place(&mut control, &other).unwrap()), (0, 1));
    assert_eq!(place(&mut control, &one).unwrap(), 0, "it is known");
    cq(&mut control, 0, 1).unwrap();
    // One of the two breaks. No connection is made there before its QPs are destroyed.
    control.reception.devices_mut().poller_broke(1, 0);
    let refused = cq(&mut control, 0, 1).unwrap_err();
    assert!(refused.contains("connect again"), "{refused}");
    cq(&mut control, 0, 0).expect("the other poll group's");
    cq(&mut control, 1, 1).expect("the other device's");
    let remains = || {
        let pd = one.alloc_pd().unwrap();
        let region = Region::allocate(4096, PageKind::Normal).unwrap();
        let mr = Arc::new(pd.register(&region, Access::LOCAL_WRITE).unwrap());
        let memory = PollerMemory { arena: Arc::clone(&mr), zeros: mr, volumes: Vec::new() };
        (pd.poller(8).unwrap().0, Some(memory))
    };
    let (poller, memory) = remains();
    control.reception.devices_mut().poller_gone(1, 0, poller, memory);
    cq(&mut control, 0, 1).expect("a new one");
    // Both break, as when the device is gone. The next device gets its place.
    for group in [0, 1] {
        control.reception.devices_mut().poller_broke(group, 0);
    }
    for group in [0, 1] {
        assert!(control.reception.devices().has(0), "the QPs of group {group} are not destroyed");
        let (poller, memory) = remains();
        control.reception.devices_mut().poller_gone(group, 0, poller, memory);
    }
    assert!(!control.reception.devices().has(0), "nothing of it is kept");
    assert!(cq(&mut control, 0, 0).unwrap_err().contains("gone"));
    let third = Device::Soft(Network::new(3).device());
    assert_eq!(place(&mut control, &third).unwrap(), 0);
    assert_eq!(place(&mut control, &one).unwrap(), 2, "plugged in again");
    // A table of limited length.
    for seed in 0..POLLERS_MAX as u64 {
        let result = place(&mut control, &Device::Soft(Network::new(100 + seed).device()));
        assert_eq!(result.is_ok(), 3 + seed < POLLERS_MAX as u64, "{seed}: {result:?}");
    }
}

#[test]
fn news_of_a_destroyed_qp_waits_for_a_mailbox_with_room() {
    let mut control = control_of(StateDirectory::nothing(), ended_groups(), Vec::new()).unwrap();
    let connection = ConnectionId { index: 3, generation: 9 };
    let destroyed = ReceptionNews::Destroyed(Destroyed::Qp { group: 1, connection });
    control.reception.on_news(destroyed, &mut control.core, &mut control.groups);
    control.groups.deliver();
    let kept: Vec<_> = control.groups.kept(1).collect();
    let told =
        |mail: &ToGroup| matches!(mail, ToGroup::Destroyed { connection: c } if *c == connection);
    assert!(kept.len() == 1 && told(kept[0]), "it is not forgotten: {kept:?}");
}

#[test]
fn an_accepted_login_checks_the_room_for_files() {
    let mut control = control_of(StateDirectory::nothing(), ended_groups(), Vec::new()).unwrap();
    let tcp = ["tcp://192.0.2.1:7721".to_owned()];
    *control.reception.files() = FileRoom::new(Some(1), &tcp);
    let knock = Knock {
        asked: &hello(),
        introduction: None,
        peer: "peer",
        memory_bytes: 1,
        fresh: SessionId([7; 16]),
        is_encrypted: false,
        has_ways: false,
    };
    let admitted = control.core.connect(&knock, Instant::now()).expect("there is room");
    let login = rblk_protocol::LoginRequest {
        host: rblk_protocol::HostId([5; 16]),
        host_name: Name::new("host").unwrap(),
        keep_alive_ms: 1000,
        join: None,
    };
    let (opcode, tag, sequence) =
        (rblk_protocol::Opcode::Login, rblk_protocol::Tag(1), rblk_protocol::Sequence(1));
    let command = rblk_protocol::CommandCapsule::new(opcode, tag, admitted.epoch, sequence);
    let connection = ConnectionId { index: 0, generation: 1 };
    let from = ConnectionRef { group: 0, connection };
    control.core.command(from, admitted.id, &command, &login.to_wire(), Instant::now());
    control.carry_out();
    assert_eq!(control.core.sessions().iter().count(), 1);
    assert_eq!(control.reception.files().look(u64::MAX), None, "it was told already");
}

/// A control of target `t` that serves no volume.
fn of_state(dir: &std::path::Path) -> anyhow::Result<Control> {
    control(StateDirectory::open(dir, &Name::new("t").unwrap()).unwrap())
}

/// The record of volume `v`.
fn record_path(dir: &std::path::Path) -> std::path::PathBuf {
    dir.join(format!("t.{}.volume", "01".repeat(16)))
}

#[test]
fn an_unreadable_record_prevents_the_start() {
    let dir = tempfile::tempdir().unwrap();
    let path = record_path(dir.path());
    drop(of_state(dir.path()).unwrap());
    assert!(!path.exists(), "a start that fails before it serves changes nothing");
    std::fs::create_dir(&path).unwrap();
    let error = format!("{:#}", of_state(dir.path()).unwrap_err());
    let words = [path.to_str().unwrap(), "Is a directory", "state_dir"];
    assert!(words.iter().all(|word| error.contains(word)), "{error}");
    assert!(path.is_dir(), "and stays as it is");
    std::fs::remove_dir(&path).unwrap();
    of_state(dir.path()).unwrap().begin();
    assert!(path.exists(), "before it serves");
}

fn exclusive() -> crate::record::holders::Claimant {
    crate::record::holders::Claimant {
        mode: rblk_protocol::AccessMode::Exclusive,
        host: rblk_protocol::HostId([5; 16]),
        host_name: Name::new("host").unwrap(),
    }
}

#[test]
fn a_missing_record_repeats_no_generation() {
    let dir = tempfile::tempdir().unwrap();
    let uuid = stored_block().uuid;
    let first_of = |control: &Control| {
        let mut holders = control.core.holders().clone();
        holders.begin(&uuid, &exclusive()).unwrap().unwrap().generation
    };
    let mut first = of_state(dir.path()).unwrap();
    first.begin();
    let given = first_of(&first);
    first.persister.end(&[], &[]);
    std::fs::remove_file(record_path(dir.path())).unwrap();
    let second = of_state(dir.path()).unwrap();
    assert!(first_of(&second) > given, "two holders would have one generation");
    assert!(!second.core.holders().is_last(&uuid, &exclusive(), given));
}

#[test]
fn a_volume_on_another_file_fences_its_earlier_holder() {
    let dir = tempfile::tempdir().unwrap();
    let uuid = stored_block().uuid;
    let start = |store: &str| {
        let state = StateDirectory::open(dir.path(), &Name::new("t").unwrap()).unwrap();
        let stores = vec![(uuid, StoreIdentity::parse(store))];
        let mut control = control_over(state, stores).unwrap();
        control.begin();
        control
    };
    let first = start("inode:1");
    let record = first.core.holders().clone().begin(&uuid, &exclusive()).unwrap().unwrap();
    let generation = record.generation;
    assert!(first.persister.persist(Ticket(0), record).is_none());
    first.persister.end(&[], &[]);
    let again = start("inode:1");
    assert!(again.core.holders().is_last(&uuid, &exclusive(), generation));
    again.persister.end(&[], &[]);
    for _ in 0..2 {
        // Also after one more start from the new one.
        let other = start("inode:2");
        assert!(!other.core.holders().is_last(&uuid, &exclusive(), generation));
        other.persister.end(&[], &[]);
    }
}

#[test]
fn hosts_that_were_read_before_those_in_force_are_not_used() {
    let mut control = control(StateDirectory::nothing()).unwrap();
    let named = |name: &str| vec![HostConfig::new(name, Vec::new(), Vec::new())];
    let mut in_force = |name: &str, reading| {
        let Control { running, core, .. } = &mut control;
        running.let_in_only(&named(name), Reading(reading), core).unwrap();
        running.get().hosts[0].name.clone()
    };
    assert_eq!(in_force("a", 1), "a");
    assert_eq!(in_force("more-of-a", 1), "more-of-a", "a reload comes in two parts");
    assert_eq!(in_force("c", 3), "c");
    // A reload that began before, and waited for a volume.
    assert_eq!(in_force("b", 2), "c");
}

#[test]
fn a_volume_that_rights_name_is_not_removed() {
    let mut control = control(StateDirectory::nothing()).unwrap();
    let running = control.running.get_mut();
    running.volumes.push(VolumeConfig::file("v", "/srv/v.img"));
    running.hosts.push(HostConfig::new("db1", Vec::new(), vec!["v:rw".parse().unwrap()]));
    let mut removed = |alone| {
        let removal = VolumeChange::Remove { name: "v".to_owned(), which: None, force: false };
        let (reply, mut answer) = oneshot::channel();
        let Control { volumes, core, running, persister, .. } = &mut control;
        let order = (removal, ChangeFiles::default(), alone);
        volumes.change(order, core, (running, persister), reply);
        answer.try_recv()
    };
    let refused = removed(true).unwrap().unwrap_err();
    assert!(refused.contains("host remove db1 --volume v"), "{refused}");
    // A reload takes rights and volume in one.
    assert!(removed(false).is_err(), "it has begun");
}

#[tokio::test]
async fn data_given_up_at_the_end_is_an_event_and_the_end_is_not_clean() {
    let mut control = control(StateDirectory::nothing()).unwrap();
    assert!(is_clean(&[], &control.core, &control.persister));
    let cause = "No space left on device (os error 28)".to_owned();
    let unsaved = vec![Unsaved { volume: VolumeIndex(0), dirty_bytes: 2 << 20, cause }];
    control.on_group(FromGroup::Refused { group: 0, unsaved: unsaved.clone() });
    control.on_group(FromGroup::Refused { group: 1, unsaved: unsaved.clone() });
    for group in 0..2 {
        control.on_group(FromGroup::Stopped { group, unsaved: unsaved.clone(), error: None });
    }
    let Control { ends, core, groups, events, .. } = &mut control;
    let given_up = ends.tell_end((core, groups), events).await;
    assert_eq!((given_up.len(), given_up[0].dirty_bytes), (1, 4 << 20), "of both groups");
    assert!(!is_clean(&given_up, &control.core, &control.persister));
    let events = control.events_after(0).events;
    let told: Vec<_> = events.iter().map(|event| (event.kind, event.volume.as_deref())).collect();
    let volume = Some(given_up[0].volume.as_str());
    assert_eq!(told, [(EventKind::StoreError, volume), (EventKind::LostWrites, volume)]);
    assert!(events[1].text.contains("4MiB (No space left on device (os error 28))"), "{events:?}");
}

#[test]
fn the_loss_of_an_image_is_told_although_its_volume_was_removed_by_force() {
    let mut control = control_of(StateDirectory::nothing(), ended_groups(), Vec::new()).unwrap();
    let gone = VolumeIndex(7);
    assert!(control.core.volume(gone).is_none());
    control.on_image_lost((gone, "the cluster has fenced this target".to_owned()));
    let told = |control: &Control, is: fn(&ToGroup) -> bool| -> Vec<bool> {
        (0..2).map(|group| control.groups.kept(group).any(is)).collect()
    };
    let is_lost = |mail: &ToGroup| matches!(mail, ToGroup::Lost(VolumeIndex(7)));
    assert_eq!(told(&control, is_lost), [true; 2]);
    for group in [0, 1] {
        control.on_group(FromGroup::KnowsLoss { group, volume: gone });
    }
    let may_end = |mail: &ToGroup| matches!(mail, ToGroup::LetGo(VolumeIndex(7)));
    assert_eq!(told(&control, may_end), [true; 2], "or its ops are held for ever");
    control.on_tick(Instant::now());
    assert!(!control.volumes.has_lost(), "no change is needed to end it");
}
