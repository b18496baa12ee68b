//! Several capsules in one message: the packing, the meaning of a list, and the effect of a list
//! that breaks a rule.

use rblk_initiator::engine::PathEnd;
use rblk_initiator::engine::io::{Io, IoOp};
use rblk_operate::mount::queue_counts::QueueCounts;
use rblk_operate::target::group_counts::StatsSnapshot;
use rblk_protocol::limits::{COMMAND_LIST_BYTES, LIST_MAX};
use rblk_protocol::{
    BlockCount, BlockSize, CommandCapsule, Features, Opcode, ResponseCapsule, Sequence, Status,
    Tag, VolumeHandle,
};
use rblk_rig::inprocess::{QueueId, QueueOptions, RigOptions};
use rblk_rig::ram_store::StoreConditions;
use rblk_rig::seed::Random;
use rblk_target::volume::ids::{SessionIndex, VolumeIndex};
use rblk_tests::bed::{Bed, FROZEN, MEMORY, PATIENCE, STORE, pattern};
use rblk_tests::raw::{Heard, RawPeer, RawTarget};

const DEPTH: u16 = 32;
const LISTS: Features = Features::CAPSULE_LISTS;
const NONE: Features = Features(0);
const BOTH: Features = Features(Features::WRITE_WITH_IMM.0 | LISTS.0);
const DATA: Features = Features(BOTH.0 | Features::DATA_LISTS.0);
const FIRST: Features = Features(DATA.0 | Features::DATA_FIRST.0);

fn options(features: Features) -> QueueOptions {
    QueueOptions { depth: DEPTH, io_max_bytes: 64 << 10, features, ..QueueOptions::default() }
}

/// A path with a key in every command, unless the data is at most `in_capsule_bytes`.
fn raw(features: Features, in_capsule_bytes: u32) -> RawTarget {
    RawTarget::tested(QueueOptions { in_capsule_bytes, ..options(features) })
}

fn submit(target: &mut RawTarget, op: IoOp, tag: u16) {
    let len = if op == IoOp::Flush { 0 } else { 512 };
    let io = Io::new(op, 0, len, BlockSize::new(512).unwrap()).unwrap();
    target.engine.submit(Tag(tag), io).unwrap();
}

fn packed(target: &mut RawTarget) -> Vec<Vec<CommandCapsule>> {
    target.steps(5);
    target.messages()
}

fn tags(messages: &[Vec<CommandCapsule>]) -> Vec<Vec<u16>> {
    messages.iter().map(|message| message.iter().map(|c| c.tag.0).collect()).collect()
}

#[test]
fn the_commands_of_a_turn_share_messages_in_the_order_of_their_sequence() {
    let mut target = raw(BOTH, 512);
    for tag in 0..20 {
        submit(&mut target, [IoOp::Read, IoOp::Flush][usize::from(tag % 2)], tag);
    }
    let messages = packed(&mut target);
    assert_eq!(tags(&messages), [(0..16).collect::<Vec<_>>(), (16..20).collect()]);
    let sequences: Vec<u32> = messages.iter().flatten().map(|c| c.sequence.0).collect();
    assert!(sequences.is_sorted_by(|a, b| a + 1 == *b), "{sequences:?}");
    // Data ends a message, and a later command never changes a message that was posted.
    for (tag, op) in [IoOp::Read, IoOp::Write, IoOp::Write, IoOp::Read].into_iter().enumerate() {
        submit(&mut target, op, 20 + u16::try_from(tag).unwrap());
    }
    assert_eq!(tags(&packed(&mut target)), [vec![20, 21], vec![22], vec![23]]);
    submit(&mut target, IoOp::Read, 24);
    assert_eq!(tags(&packed(&mut target)), [vec![24]]);
    assert_eq!(target.path_end(), None);
}

#[test]
fn the_writes_of_a_turn_share_messages_with_their_data() {
    share_messages(DATA);
    share_messages(FIRST);
}

fn share_messages(features: Features) {
    use IoOp::{Flush, Read, Write};
    let mut target = raw(features, 512);
    let stride = 64 << 10;
    for tag in 0..usize::from(DEPTH) {
        target.buffers.write(tag * stride, &pattern(tag as u64, 512));
    }
    let turns: [(&[IoOp], &[&[u16]]); 6] = [
        (&[Write], &[&[0]]),
        (&[Write; 2], &[&[0, 1]]),
        (&[Write; 3], &[&[0, 1, 2]]),
        (&[Write; 8], &[&[0, 1, 2], &[3, 4, 5], &[6, 7]]),
        // The third data ends a message, and so does the sixteenth command.
        (
            &[Read, Write, Flush, Write, Read, Write, Read, Write, Read],
            &[&[0, 1, 2, 3, 4, 5], &[6, 7, 8]],
        ),
        (
            &[
                Read, Write, Read, Read, Read, Read, Read, Read, Read, Read, Read, Read, Read,
                Write, Read, Read, Write,
            ],
            &[&[0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15], &[16]],
        ),
    ];
    let mut lists = 0;
    for (ops, expected) in turns {
        for (tag, op) in (0..).zip(ops) {
            submit(&mut target, *op, tag);
        }
        target.steps(5);
        let messages = target.messages_with_data();
        let tags: Vec<Vec<u16>> =
            messages.iter().map(|m| m.iter().map(|(c, _)| c.tag.0).collect()).collect();
        assert_eq!(tags, expected);
        for (command, data) in messages.iter().flatten() {
            let own = pattern(command.tag.0.into(), 512);
            let is_write = command.opcode == Opcode::Write;
            assert!(*data == if is_write { own } else { Vec::new() }, "{:?}", command.tag);
        }
        let sequences: Vec<u32> = messages.iter().flatten().map(|(c, _)| c.sequence.0).collect();
        assert!(sequences.is_sorted_by(|a, b| a + 1 == *b), "{sequences:?}");
        let answers: Vec<_> = messages.iter().flatten().map(|(c, _)| answer(c).to_wire()).collect();
        for list in answers.chunks(LIST_MAX) {
            target.send(list.as_flattened());
        }
        assert_eq!(target.path_end(), None);
        lists += expected.iter().filter(|tags| tags.len() > 1).count();
    }
    assert_eq!(target.outcomes.len(), turns.iter().map(|(ops, _)| ops.len()).sum::<usize>());
    assert_eq!(lists, 8, "what was expected is what there is to see");
}

#[test]
fn slots_and_buffers_of_shared_messages_are_reused_after_their_arrival() {
    write_again(DATA);
    write_again(FIRST);
}

fn write_again(features: Features) {
    // As above, with data: the answer to a command of a message frees its tag, its buffer and its
    // slot. The next command with that tag has other data, independent of the other commands.
    let mut random = Random::new(2);
    let mut target = raw(features, 512);
    let mut waiting: Vec<(CommandCapsule, u64)> = Vec::new();
    let mut free: Vec<u16> = (0..DEPTH).collect();
    let (mut version, mut shared) = (0, 0);
    for round in 0..300 {
        let count = random.index(free.len() + 1);
        let mut said = Vec::new();
        for _ in 0..count {
            let tag = free.swap_remove(random.index(free.len()));
            version += 1;
            target.buffers.write(usize::from(tag) * (64 << 10), &pattern(version, 512));
            submit(&mut target, IoOp::Write, tag);
            said.push((tag, version));
        }
        target.steps(5);
        let messages = target.messages_with_data();
        shared += messages.iter().filter(|message| message.len() == 3).count();
        let seen = messages.into_iter().flatten().zip(&said);
        let mut came = 0;
        for ((command, data), (tag, version)) in seen {
            assert_eq!(command.tag.0, *tag, "round {round}");
            assert!(data == pattern(*version, 512), "round {round}");
            waiting.push((command, *version));
            came += 1;
        }
        assert_eq!(came, count, "round {round}");
        for _ in 0..random.index(waiting.len() + 1) {
            let (command, _) = waiting.swap_remove(random.index(waiting.len()));
            target.send(&answer(&command).to_wire());
            free.push(command.tag.0);
        }
        assert_eq!(target.path_end(), None, "round {round}");
    }
    assert!(shared > 100, "{shared} messages were full");
}

#[test]
fn nothing_is_packed_that_was_not_agreed() {
    let mut target = raw(Features::WRITE_WITH_IMM, 512);
    for tag in 0..8 {
        submit(&mut target, IoOp::Read, tag);
    }
    assert_eq!(tags(&packed(&mut target)), (0..8).map(|tag| vec![tag]).collect::<Vec<_>>());
}

#[test]
fn a_slot_is_reused_only_after_its_message_arrived() {
    // Tags come free and are used again in another order each time, without signaled WRs: the
    // target must read the engine's last bytes in every message.
    let mut random = Random::new(1);
    let mut target = raw(LISTS, 0);
    for round in 0..200 {
        let mut order: Vec<u16> = (0..DEPTH).collect();
        for at in 0..order.len() {
            order.swap(at, random.index(at + 1));
        }
        order.truncate(1 + random.index(order.len()));
        for tag in &order {
            submit(&mut target, IoOp::Flush, *tag);
        }
        let commands: Vec<_> = packed(&mut target).concat();
        let seen: Vec<u16> = commands.iter().map(|c| c.tag.0).collect();
        assert_eq!(seen, order, "round {round}");
        let answers: Vec<_> = commands
            .iter()
            .map(|c| ResponseCapsule::new(c.tag, c.sequence, Status::Ok).to_wire())
            .collect();
        for list in answers.chunks(1 + random.index(LIST_MAX)) {
            target.send(list.as_flattened());
        }
        assert_eq!(target.path_end(), None, "round {round}");
        assert_eq!(target.outcomes.len(), order.len(), "round {round}");
        target.outcomes.clear();
    }
}

/// The counters of rounds of requests at full depth, in a steady state.
fn counted(features: Features, op: IoOp, rounds: u64) -> (QueueCounts, StatsSnapshot) {
    let mut bed = Bed::new(&RigOptions::default());
    let queue = bed.queue(MEMORY, options(features));
    let run = |bed: &mut Bed, rounds: u64| {
        for _ in 0..rounds {
            for tag in 0..DEPTH {
                bed.submit(queue, tag, op, u64::from(tag) * 4096, 4096);
            }
            assert!(bed.outcomes(DEPTH.into()).iter().all(|o| o.result == 4096));
        }
    };
    run(&mut bed, 10);
    let (i, t) = (bed.rig.queue_counts(queue), bed.rig.target_counts());
    run(&mut bed, rounds);
    let (i2, t2) = (bed.rig.queue_counts(queue), bed.rig.target_counts());
    (i2.since(&i), t2.since(&t))
}

#[test]
fn reads_at_depth_share_their_commands_and_writes_their_answers() {
    let rounds = 100;
    let ios = rounds * u64::from(DEPTH);
    let lists = ios / LIST_MAX as u64;
    let (i, t) = counted(BOTH, IoOp::Read, rounds);
    assert_eq!((i.sends, i.lists, i.listed), (lists, lists, ios));
    assert_eq!((t.rdma_writes_with_imm, t.sends, t.recvs), (ios, 0, lists), "data differs");
    let (i, t) = counted(LISTS, IoOp::Read, rounds);
    assert_eq!((i.sends, i.lists, i.listed), (lists, lists, ios));
    assert_eq!((t.rdma_writes, t.sends, t.lists, t.listed), (ios, lists, lists, ios));
    assert_eq!((i.recvs, i.completions), (lists, lists + i.signaled));
    let (i, t) = counted(BOTH, IoOp::Write, rounds);
    assert_eq!((i.sends, i.lists), (ios, 0), "each has its data");
    assert_eq!((t.sends, t.lists, t.listed, t.recvs), (lists, lists, ios, ios));
    for op in [IoOp::Read, IoOp::Write] {
        let (i, t) = counted(Features::WRITE_WITH_IMM, op, rounds);
        assert_eq!((i.sends, t.sends + t.rdma_writes_with_imm), (ios, ios));
        assert_eq!((i.lists, i.listed, t.lists, t.listed), (0, 0, 0, 0));
    }
}

#[test]
fn writes_at_depth_share_messages_with_their_data() {
    let rounds = 100;
    let (i, t) = counted(DATA, IoOp::Write, rounds);
    let ios = rounds * u64::from(DEPTH);
    // 32 commands are ten times three and two.
    let messages = rounds * 11;
    assert_eq!((i.sends, i.lists, i.listed), (messages, messages, ios));
    assert_eq!((i.in_capsule_writes, i.keyed_commands), (ios, 0));
    assert_eq!((t.recvs, t.in_capsule_writes, t.copied_bytes), (messages, ios, ios * 4096));
    assert_eq!((t.sends, t.lists, t.listed), (ios / 16, ios / 16, ios), "answers as ever");
    let (i, _) = counted(DATA, IoOp::Read, rounds);
    assert_eq!((i.sends, i.listed), (ios / 16, ios), "reads as ever");
    // The data of one message is limited, too: two of 8 KiB, one of 16.
    for (bytes, messages) in [(8 << 10, 16), (16 << 10, 32)] {
        let mut bed = Bed::new(&RigOptions::default());
        let options = QueueOptions { in_capsule_bytes: bytes, ..options(DATA) };
        let queue = bed.queue(MEMORY, options);
        let before = bed.rig.queue_counts(queue);
        for tag in 0..DEPTH {
            let offset = u64::from(tag) * u64::from(bytes);
            bed.rig.fill_buffer(queue, Tag(tag), &pattern(tag.into(), bytes as usize));
            bed.submit(queue, tag, IoOp::Write, offset, bytes.into());
        }
        assert!(bed.outcomes(DEPTH.into()).iter().all(|o| o.result == bytes.cast_signed()));
        let counts = bed.rig.queue_counts(queue).since(&before);
        assert_eq!((counts.sends, counts.in_capsule_writes), (messages, DEPTH.into()), "{bytes}");
        for tag in 0..DEPTH {
            let offset = u64::from(tag) * u64::from(bytes);
            let data = bed.read(queue, offset, bytes as usize);
            assert!(data == pattern(tag.into(), bytes as usize), "{bytes}, {tag}");
        }
    }
}

/// An honest queue, and a peer under observation.
fn watched(features: Features, volume: VolumeIndex) -> (Bed, QueueId, RawPeer) {
    let mut bed = Bed::new(&RigOptions::default());
    let bystander = bed.queue(STORE, options(BOTH));
    let session = bed.rig.begin_session();
    bed.open_all(session);
    let peer = RawPeer::tested(&mut bed, session, volume, options(features));
    (bed, bystander, peer)
}

fn assert_unharmed(bed: &mut Bed, bystander: QueueId) {
    bed.write(bystander, 4096, &pattern(21, 16384));
    assert!(bed.read(bystander, 4096, 16384) == pattern(21, 16384));
    assert_eq!(bed.rig.take_path_ends(bystander), []);
}

fn bytes(commands: &[CommandCapsule]) -> Vec<u8> {
    commands.iter().flat_map(CommandCapsule::to_wire).collect()
}

fn write(peer: &mut RawPeer, tag: u16, blocks: u32) -> CommandCapsule {
    let command = peer.transfer(Opcode::Write, tag, 0, blocks);
    CommandCapsule { buffer: None, in_capsule_bytes: blocks * 512, ..command }
}

#[test]
fn a_list_is_served_like_its_single_commands() {
    for features in [BOTH, LISTS] {
        let mut bed = Bed::new(&RigOptions::default());
        let session = bed.rig.begin_session();
        bed.open_all(session);
        let mut peer = RawPeer::tested(&mut bed, session, STORE, options(features));
        // Commands of another epoch, of no volume, empty, out of bounds, good: each gets its own
        // answer.
        let mut list: Vec<_> =
            (0..14).map(|tag| peer.transfer(Opcode::Read, tag, u64::from(tag) * 8, 8)).collect();
        for (tag, command) in list.iter_mut().enumerate() {
            let at = tag * 4096;
            command.buffer = Some(peer.descriptor(at, 4096));
        }
        list[3].epoch.0 += 1;
        list[4].volume.0 = 77;
        list[5].count = BlockCount(0);
        list[6].lba.0 = 1 << 40;
        list.push(CommandCapsule { tag: Tag(DEPTH), ..peer.command(Opcode::KeepAlive, 0) });
        list.push(write(&mut peer, 15, 8));
        assert_eq!(list.len(), LIST_MAX);
        let data = pattern(4, 4096);
        peer.send(&[bytes(&list), data.clone()].concat());
        let heard = peer.hear_answers(&mut bed, LIST_MAX);
        assert_eq!(heard.len(), LIST_MAX);
        let mut statuses = vec![None; usize::from(DEPTH) + 1];
        for answer in heard {
            let (tag, status) = match answer {
                Heard::Response(response) => (response.tag, response.status),
                Heard::Immediate(imm) => (imm.tag, Status::Ok),
                Heard::End(status) => panic!("{status:?}"),
            };
            assert_eq!(statuses[tag.index()].replace(status), None, "{tag:?} is answered twice");
        }
        for command in &list {
            let expected = match command.tag.0 {
                3 => Some(Status::Fenced),
                4 => Some(Status::NoSuchVolume),
                5 | 6 => None,
                _ => Some(Status::Ok),
            };
            let status = statuses[command.tag.index()].expect("an answer");
            assert_eq!(status, expected.unwrap_or(status), "{:?}", command.tag);
            assert_eq!(status == Status::Ok, !(3..=6).contains(&command.tag.0));
        }
        let read = peer.transfer(Opcode::Read, 0, 0, 8);
        peer.send(&read.to_wire());
        peer.hear_answers(&mut bed, 1);
        let mut got = vec![0; 4096];
        peer.lent.region().read(0, &mut got);
        assert!(got == data, "the data of the list's last command");
    }
}

/// A write with 4 KiB of in-capsule data, to a volume of the session.
fn inside(peer: &mut RawPeer, tag: u16, volume: VolumeIndex, lba: u64) -> CommandCapsule {
    let command = peer.transfer(Opcode::Write, tag, lba, 8);
    let volume = VolumeHandle(u32::from(volume.0) + 1);
    CommandCapsule { volume, buffer: None, in_capsule_bytes: 4096, ..command }
}

struct Short {
    bed: Bed,
    rig: RigOptions,
    other: QueueId,
    session: SessionIndex,
    peer: RawPeer,
}

/// A peer of a target without free memory: reads of another queue hold it until the store is
/// released. Writes to [`STORE`] wait with their data in the receive slot, writes to [`MEMORY`] do
/// not.
fn short_of_memory(features: Features) -> Short {
    // One request of a session may always take memory: the first read takes all.
    let rig = RigOptions { arena_bytes: 64 << 10, io_max_bytes: 64 << 10, ..RigOptions::default() };
    let mut bed = Bed::new(&rig);
    let other = bed.queue(STORE, options(BOTH));
    let session = bed.rig.begin_session();
    bed.open_all(session);
    let peer = RawPeer::tested(&mut bed, session, STORE, options(features));
    let stalled = StoreConditions { stalled: true, ..StoreConditions::default() };
    bed.rig.store_mut().set_conditions(stalled);
    for tag in 0..4 {
        bed.submit(other, tag, IoOp::Read, u64::from(tag) << 16, 64 << 10);
    }
    for _ in 0..100 {
        bed.rig.step();
    }
    Short { bed, rig, other, session, peer }
}

fn tags_heard(heard: &[Heard]) -> Vec<u16> {
    let tag = |heard: &Heard| match heard {
        Heard::Response(response) if response.status == Status::Ok => response.tag.0,
        other => panic!("{other:?}"),
    };
    let mut tags: Vec<u16> = heard.iter().map(tag).collect();
    tags.sort_unstable();
    tags
}

#[test]
fn a_receive_slot_comes_back_with_the_last_data_in_it() {
    let Short { mut bed, other, mut peer, .. } = short_of_memory(DATA);
    let recvs = |bed: &Bed| bed.rig.target_counts().recvs;
    // In each order: the waiting write is first, in the middle, last.
    for (round, waits) in (0..3u16).enumerate() {
        let before = recvs(&bed);
        let tag = |at: u16| 3 * waits + at;
        let list: Vec<_> = (0..3)
            .map(|at| {
                let volume = if at == waits { STORE } else { MEMORY };
                inside(&mut peer, tag(at), volume, u64::from(tag(at)) * 8)
            })
            .collect();
        let beat = CommandCapsule { tag: Tag(DEPTH), ..peer.command(Opcode::KeepAlive, 0) };
        let data = |at: u16| pattern(tag(at).into(), 4096);
        let message = [bytes(&list), beat.to_wire().to_vec(), data(2), data(1), data(0)].concat();
        peer.send(&message);
        let mut expected: Vec<u16> = (0..3).filter(|at| *at != waits).map(tag).collect();
        expected.push(DEPTH);
        assert_eq!(tags_heard(&peer.hear_answers(&mut bed, 3)), expected, "round {round}");
        assert_eq!(recvs(&bed), before, "its slot is still in use");
        // A single message finds another slot, which comes back at once.
        let beat = CommandCapsule { tag: Tag(DEPTH), ..peer.command(Opcode::KeepAlive, 0) };
        peer.send(&beat.to_wire());
        assert_eq!(peer.hear_answers(&mut bed, 1).len(), 1);
        assert_eq!(recvs(&bed), before + 1);
    }
    let before = recvs(&bed);
    bed.rig.store_mut().set_conditions(StoreConditions::default());
    assert_eq!(tags_heard(&peer.hear_answers(&mut bed, 3)), [0, 4, 8], "those that waited");
    // With the slot of the other queue's message, which is posted with its first answer.
    assert_eq!(recvs(&bed), before + 3 + 1, "once each");
    assert!(bed.outcomes(4).iter().all(|o| o.result == 64 << 10));
    // The data of waiting requests did not change.
    for (at, volume) in [(0, STORE), (4, STORE), (8, STORE), (1, MEMORY), (5, MEMORY), (7, MEMORY)]
    {
        let queue = if volume == STORE { other } else { bed.queue(MEMORY, options(BOTH)) };
        assert!(bed.read(queue, at * 4096, 4096) == pattern(at, 4096), "{at}");
    }
}

#[test]
fn a_peer_that_keeps_its_credits_always_finds_a_receive_slot() {
    let Short { mut bed, mut peer, .. } = short_of_memory(DATA);
    // All tags but one wait. Each occupies a slot alone, after the other data in it was used.
    let last = DEPTH - 1;
    let busy = |peer: &mut RawPeer, waits: Option<u16>, round: u16| {
        let mut list = vec![inside(peer, last, MEMORY, 0)];
        list.push(CommandCapsule { tag: Tag(DEPTH), ..peer.command(Opcode::KeepAlive, 0) });
        list.extend(waits.map(|tag| inside(peer, tag, STORE, u64::from(tag) * 8)));
        let data = waits.map(|tag| pattern(tag.into(), 4096)).unwrap_or_default();
        [bytes(&list), data, pattern(1000 + u64::from(round), 4096)].concat()
    };
    for round in 0..300 {
        let waits = Some(round).filter(|tag| *tag < last);
        let message = busy(&mut peer, waits, round);
        peer.send(&message);
        let heard = peer.hear_answers(&mut bed, 2);
        assert_eq!(tags_heard(&heard), [last, DEPTH], "round {round}");
    }
    bed.rig.store_mut().set_conditions(StoreConditions::default());
    let heard = peer.hear_answers(&mut bed, last.into());
    assert_eq!(tags_heard(&heard), (0..last).collect::<Vec<_>>());
    assert!(bed.outcomes(4).iter().all(|o| o.result == 64 << 10));
    let queue = bed.queue(STORE, options(BOTH));
    for tag in 0..u64::from(last) {
        assert!(bed.read(queue, tag * 4096, 4096) == pattern(tag, 4096), "{tag}");
    }
}

#[test]
fn a_connection_that_dies_with_data_in_its_slots_leaves_nothing() {
    for (cut, good) in [(true, 2), (false, 2), (false, 0)] {
        let Short { mut bed, rig, other, session, mut peer } = short_of_memory(DATA);
        let list: Vec<_> =
            (0..3).map(|tag| inside(&mut peer, tag, STORE, 800 + u64::from(tag) * 8)).collect();
        let mut message = [bytes(&list), vec![7; 3 * 4096]].concat();
        if !cut {
            // The rule is broken after the good commands, which have begun.
            message[64 * good + 40] = 1;
        }
        peer.send(&message);
        for _ in 0..100 {
            bed.rig.step();
            let heard = peer.listen();
            assert!(
                heard.iter().all(|h| matches!(h, Heard::End(_))),
                "there is no answer: {heard:?}"
            );
        }
        peer.wire.cut();
        for _ in 0..100 {
            bed.rig.step();
        }
        bed.rig.store_mut().set_conditions(StoreConditions::default());
        assert!(bed.outcomes(4).iter().all(|o| o.result == 64 << 10));
        let ended = bed.rig.run(PATIENCE, |rig| rig.connections(session) == 0);
        assert!(ended.is_ok(), "it is buried");
        assert!(
            bed.read(other, 800 * 512, 3 * 4096) == vec![0; 3 * 4096],
            "what waited was dropped"
        );
        bed.rig.new_epoch(bed.session).unwrap();
        bed.assert_arena_is_whole(&rig);
    }
}

#[test]
fn receive_slots_of_lists_come_back_at_once() {
    // More messages than slots, while the first commands of each list are in progress.
    let mut bed = Bed::new(&RigOptions::default());
    let session = bed.rig.begin_session();
    bed.open_all(session);
    let mut peer = RawPeer::tested(&mut bed, session, STORE, options(BOTH));
    let stalled = StoreConditions { stalled: true, ..StoreConditions::default() };
    bed.rig.store_mut().set_conditions(stalled);
    let slow: Vec<_> = (0..4).map(|tag| peer.transfer(Opcode::Read, tag, 0, 8)).collect();
    peer.send(&bytes(&slow));
    for round in 0..200 {
        let beat = CommandCapsule { tag: Tag(DEPTH), ..peer.command(Opcode::KeepAlive, 0) };
        let refused = CommandCapsule { volume: VolumeHandle(77), ..slow[0] };
        peer.send(&bytes(&[CommandCapsule { tag: Tag(9), ..refused }, beat]));
        assert_eq!(peer.hear_answers(&mut bed, 2).len(), 2, "round {round}");
    }
    bed.rig.store_mut().set_conditions(StoreConditions::default());
    assert_eq!(peer.hear_answers(&mut bed, 4).len(), 4);
}

#[test]
fn a_list_that_breaks_a_rule_ends_its_connection_and_harms_nobody_else() {
    type Spoil = fn(&mut RawPeer) -> Vec<u8>;
    fn reads(peer: &mut RawPeer, count: u16) -> Vec<CommandCapsule> {
        (0..count).map(|tag| peer.transfer(Opcode::Read, tag, 0, 1)).collect()
    }
    let cases: &[(&str, Features, Spoil)] = &[
        ("a list where none was agreed", Features::WRITE_WITH_IMM, |p| bytes(&reads(p, 2))),
        ("a command and one byte", BOTH, |p| [bytes(&reads(p, 1)), vec![0]].concat()),
        ("cut in its last command", BOTH, |p| bytes(&reads(p, 3))[..191].to_vec()),
        ("longer than any", BOTH, |p| bytes(&reads(p, 17))),
        ("as long as the slot", BOTH, |p| {
            let mut list = bytes(&reads(p, 17));
            list.resize(COMMAND_LIST_BYTES + 4096, 0);
            list
        }),
        ("longer than the slot", BOTH, |p| {
            let mut list = bytes(&reads(p, 17));
            list.resize(COMMAND_LIST_BYTES + 4097, 0);
            list
        }),
        ("data in the middle", BOTH, |p| {
            let data = [bytes(&[write(p, 1, 1)]), vec![7; 512]].concat();
            [data, bytes(&reads(p, 1))].concat()
        }),
        ("the data of its first command behind its second", BOTH, |p| {
            let first = write(p, 1, 1);
            [bytes(&[first, reads(p, 1)[0]]), vec![7; 512]].concat()
        }),
        ("data that was not announced", BOTH, |p| [bytes(&reads(p, 2)), vec![0; 512]].concat()),
        ("data that is cut", BOTH, |p| {
            let last = write(p, 1, 1);
            [bytes(&[reads(p, 1)[0], last]), vec![7; 511]].concat()
        }),
        ("data above what was agreed", BOTH, |p| {
            let last = write(p, 1, 9);
            [bytes(&[last]), vec![7; 9 * 512]].concat()
        }),
        ("a tag twice", BOTH, |p| {
            let twice = [reads(p, 1), reads(p, 1)].concat();
            bytes(&twice)
        }),
        ("a tag twice, at both ends", BOTH, |p| {
            let twice = [reads(p, 15), reads(p, 1)].concat();
            bytes(&twice)
        }),
        ("a tag beyond the depth", BOTH, |p| {
            let mut list = reads(p, 3);
            list[2].tag = Tag(DEPTH + 1);
            bytes(&list)
        }),
        ("an unknown opcode", BOTH, |p| {
            let mut list = bytes(&reads(p, 3));
            list[64] = 0x7f;
            list
        }),
    ];
    // One volume answers within the turn, the other later.
    let both = cases.iter().flat_map(|case| [MEMORY, FROZEN].map(|volume| (case, volume)));
    for ((what, features, spoil), volume) in both {
        let (mut bed, bystander, mut peer) = watched(*features, volume);
        let before = bed.rig.target_counts();
        let message = spoil(&mut peer);
        peer.send(&message);
        // Commands before the broken rule may have been answered.
        let heard = peer.hear_answers(&mut bed, LIST_MAX + 1);
        assert!(matches!(heard.last(), Some(Heard::End(_))), "{what}: {heard:?}");
        let after = bed.rig.target_counts();
        let ends = |c: &StatsSnapshot| c.protocol_errors + c.lost_connections;
        assert_eq!(ends(&after) - ends(&before), 1, "{what}");
        assert_unharmed(&mut bed, bystander);
    }
}

fn answer(command: &CommandCapsule) -> ResponseCapsule {
    ResponseCapsule::new(command.tag, command.sequence, Status::Ok)
}

#[test]
fn answers_count_up_to_the_one_that_breaks_a_rule() {
    type Spoil = fn(&[CommandCapsule]) -> Vec<u8>;
    fn wire(answers: &[ResponseCapsule]) -> Vec<u8> {
        answers.iter().flat_map(ResponseCapsule::to_wire).collect()
    }
    // The number of answers that count, of three.
    let cases: &[(&str, usize, Features, Spoil)] = &[
        ("all", 3, LISTS, |c| wire(&[answer(&c[2]), answer(&c[0]), answer(&c[1])])),
        ("a list where none was agreed", 0, NONE, |c| wire(&[answer(&c[0]), answer(&c[1])])),
        ("cut in its last answer", 0, LISTS, |c| {
            wire(&[answer(&c[0]), answer(&c[1])])[..31].to_vec()
        }),
        ("longer than any", 0, LISTS, |c| wire(&[answer(&c[0]); 17])),
        ("longer than the slot", 0, LISTS, |c| wire(&[answer(&c[0]); 40])),
        ("one twice", 1, LISTS, |c| wire(&[answer(&c[0]), answer(&c[0]), answer(&c[1])])),
        ("a wrong check", 1, LISTS, |c| {
            let stale = Sequence(c[1].sequence.0 + 7);
            let wrong = ResponseCapsule::new(c[1].tag, stale, Status::Ok);
            wire(&[answer(&c[0]), wrong, answer(&c[2])])
        }),
        ("a tag beyond the depth", 2, LISTS, |c| {
            let wrong = ResponseCapsule { tag: Tag(DEPTH + 1), ..answer(&c[2]) };
            wire(&[answer(&c[0]), answer(&c[1]), wrong])
        }),
        ("the connection's own tag", 2, LISTS, |c| {
            let wrong = ResponseCapsule { tag: Tag(DEPTH), ..answer(&c[2]) };
            wire(&[answer(&c[0]), answer(&c[1]), wrong])
        }),
        ("a reserved byte", 1, LISTS, |c| {
            let mut bytes = wire(&[answer(&c[0]), answer(&c[1])]);
            bytes[31] = 1;
            bytes
        }),
    ];
    for (what, answered, features, spoil) in cases {
        let mut target = raw(*features, 0);
        for tag in 0..3 {
            submit(&mut target, IoOp::Flush, tag);
        }
        let commands = packed(&mut target).concat();
        target.send(&spoil(&commands));
        let end = target.path_end();
        assert_eq!(end.is_none(), *answered == 3, "{what}: {end:?}");
        assert!(
            matches!(end, None | Some(PathEnd::Protocol(_) | PathEnd::Lost(_))),
            "{what}: {end:?}"
        );
        assert_eq!(target.outcomes.len(), *answered, "{what}");
        assert_eq!(target.engine.outstanding(), 3 - answered, "{what}: the rest waits");
    }
}

#[test]
fn random_lists_of_answers_never_panic_and_never_end_a_request_that_was_not_sent() {
    for seed in 0..400 {
        let mut random = Random::new(seed);
        let mut target = raw([LISTS, BOTH][random.index(2)], 0);
        for tag in 0..DEPTH {
            submit(&mut target, IoOp::Flush, tag);
        }
        let mut commands = packed(&mut target).concat();
        while target.engine.is_connected() && !commands.is_empty() {
            let mut bytes = Vec::new();
            for _ in 0..random.within(1, 1 + LIST_MAX as u64) {
                if commands.is_empty() || random.chance(5) {
                    bytes.extend([0; 16].map(|_: u8| u8::try_from(random.below(256)).unwrap()));
                } else {
                    let command = commands.swap_remove(random.index(commands.len()));
                    bytes.extend(answer(&command).to_wire());
                }
            }
            if random.chance(20) {
                bytes.truncate(1 + random.index(bytes.len()));
            }
            if random.chance(20) {
                let at = random.index(bytes.len());
                bytes[at] ^= 1 << random.below(8);
            }
            target.send(&bytes);
            target.steps(3);
        }
        assert_eq!(
            target.engine.outstanding() + target.outcomes.len(),
            usize::from(DEPTH),
            "seed {seed}"
        );
        let mut tags: Vec<u16> = target.outcomes.iter().map(|(tag, _)| tag.0).collect();
        tags.sort_unstable();
        tags.dedup();
        assert_eq!(tags.len(), target.outcomes.len(), "seed {seed}: a tag was answered twice");
    }
}
