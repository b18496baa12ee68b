//! Each rule of the document, broken once. A case panics when the target lets the peer through.

use std::time::{Duration, Instant};

use super::end::{End, Heard, Knock};
use super::noise::{self, Queue, Transport};
use super::rogue::{BLOCK, Door, Rogue, RogueQueue, naming, status_of};
use super::wire::{self, Accept, Command, Hello, feature, op, status};
use rblk_protocol::width::narrow;
use rblk_rig::seed::Random;

/// The volume that the rogue may use.
pub const MINE: &str = "mine";
/// A volume that the rogue may only read.
pub const READABLE: &str = "readable";
/// A volume of the honest host. The rogue has no right to it.
pub const HONEST: &str = "honest";
/// Blocks of [`MINE`].
pub const MINE_BLOCKS: u64 = 2048;
/// How long a target waits for the proof of a stranger.
const PROOF: Duration = Duration::from_secs(5);
/// How long a stranger may take, and as much again for a busy machine.
const STRANGER: Duration = Duration::from_secs(15);
/// Most bytes of a refusal: a text and its seal.
const REFUSAL: usize = 256;
/// Places of strangers.
const STRANGERS: usize = 64;

/// The session of the honest host, which is no secret.
#[derive(Clone, Copy, Debug)]
pub struct Victim {
    /// Its handle.
    pub session: [u8; 16],
    /// Its epoch.
    pub epoch: u32,
}

/// One case.
#[derive(Clone, Copy, Debug)]
pub struct Case {
    /// The rule it breaks.
    pub name: &'static str,
    /// Runs it.
    pub run: fn(&Door, Victim),
}

macro_rules! cases {
    ($($name:ident),* $(,)?) => { [$(Case { name: stringify!($name), run: $name }),*] };
}

/// All cases.
pub const CASES: [Case; 21] = cases![
    hellos_that_break_a_rule,
    a_peer_without_a_key,
    commands_before_the_handshake,
    commands_in_the_handshake,
    handshakes_that_break_a_rule,
    a_login_with_any_bit_flipped,
    a_login_of_another_handshake,
    strangers_that_never_log_in,
    strangers_in_a_crowd,
    a_session_of_somebody_else,
    a_session_that_is_not_there,
    bodies_without_a_seal,
    seals_that_are_wrong,
    volumes_without_a_right,
    bodies_that_break_a_rule,
    queues_without_a_proof,
    commands_that_break_a_rule,
    commands_that_are_not_allowed,
    memory_of_the_target,
    a_peer_that_takes_nothing,
    random_bytes,
];

fn is_refused(status: Option<u16>) -> bool {
    status != Some(status::OK)
}

/// Works as a rogue host, and logs out.
fn with_rogue<T>(door: &Door, work: impl FnOnce(&mut Rogue) -> T) -> T {
    let mut rogue = door.login();
    let done = work(&mut rogue);
    if !rogue.end.is_dead() {
        let command = rogue.command(op::LOGOUT);
        let message = rogue.sealed(command, &[]);
        rogue.end.send(&message);
        let _ = rogue.end.overhear();
    }
    done
}

/// Works on a proven queue of the rogue's own volume.
fn with_queue<T>(
    door: &Door,
    features: u32,
    work: impl FnOnce(&Rogue, &mut RogueQueue, u32) -> T,
) -> T {
    with_rogue(door, |rogue| {
        let (status, handle) = rogue.open(MINE, 0, 0);
        assert_eq!(status, status::OK, "the rogue's own volume");
        let mut queue = rogue.queue(door, 0, features);
        let command = queue.command(op::READ, handle, 0, 8);
        assert_eq!(queue.ask(&command.bytes()), Some(status::OK), "a proper READ");
        work(rogue, &mut queue, handle)
    })
}

fn spoilt(bytes: &[u8], at: usize, value: u8) -> Vec<u8> {
    let mut bytes = bytes.to_vec();
    bytes[at] = value;
    bytes
}

fn hellos_that_break_a_rule(door: &Door, victim: Victim) {
    let good = Hello::admin(feature::AUTH);
    let io = Hello::io([3; 16], 1, 0, 0);
    let joins = Hello::io(victim.session, victim.epoch.wrapping_add(1), 0, 0);
    let cases = [
        ("another magic", spoilt(&good.bytes(), 0, b'R')),
        ("a shorter length", spoilt(&good.bytes(), 4, 47)),
        ("a length of zero", spoilt(&good.bytes(), 4, 0)),
        ("an unknown kind", spoilt(&good.bytes(), 5, 2)),
        ("half of a hello", good.bytes()[..24].to_vec()),
        ("no version", Hello { newest: 0, oldest: 0, ..good }.bytes()),
        ("an empty range of versions", Hello { newest: 3, oldest: 4, ..good }.bytes()),
        ("old versions", Hello { newest: 2, oldest: 1, ..good }.bytes()),
        ("later versions", Hello { newest: 9, oldest: 4, ..good }.bytes()),
        ("an admin queue", Hello { queue: 1, ..good }.bytes()),
        ("no depth", Hello { depth: 0, ..good }.bytes()),
        ("the largest depth", Hello { depth: u16::MAX, ..good }.bytes()),
        ("I/O below a page", Hello { io_max: 4095, ..good }.bytes()),
        ("a queue of no session", Hello { session: [0; 16], ..io }.bytes()),
        ("a queue of a session that is not there", io.bytes()),
        ("a queue beyond the last", Hello { queue: 64, ..io }.bytes()),
        ("a queue of another epoch", joins.bytes()),
    ];
    for (what, hello) in cases {
        match End::knock(&door.address, &hello) {
            Knock::In(_) => panic!("{what}: let in"),
            Knock::Refused(_) | Knock::Failed(_) => {}
        }
    }
    // Bits that are not defined for this connection are not granted.
    let end = End::connect(&door.address, &Hello { features: u32::MAX, ..good });
    let granted = Accept::parse(&end.accept);
    assert_eq!(granted.features & !(63 | 128), 0, "{granted:?}");
    assert!(granted.depth <= 16, "{granted:?}");
}

fn a_peer_without_a_key(door: &Door, _: Victim) {
    match End::knock(&door.address, &Hello::admin(0).bytes()) {
        // 7: not allowed.
        Knock::Refused(reject) => assert_eq!(wire::number(&reject, 6, 2), 7, "the reason"),
        other => panic!("{other:?}"),
    }
}

/// A command that is not allowed yet gets no data, and no success.
fn is_not_served(end: &mut End, opcode: u8, body: &[u8]) {
    let in_capsule = u32::try_from(body.len()).expect("short");
    let epoch = end.epoch();
    let command = Command { opcode, sequence: 9, epoch, in_capsule, ..Command::default() };
    end.send(&[naming(end, command).bytes().as_slice(), body].concat());
    let heard = end.hear();
    assert!(is_refused(status_of(&heard)), "opcode {opcode:#x}: {heard:?}");
    // A refusal may come with a text, or sealed.
    let written = end.written();
    assert!(written <= REFUSAL, "opcode {opcode:#x} got {written} bytes");
}

fn commands_before_the_handshake(door: &Door, _: Victim) {
    for opcode in op::ALL {
        if ![op::AUTHENTICATE, op::KEEP_ALIVE, op::ASYNC_EVENT].contains(&opcode) {
            is_not_served(&mut door.stranger(), opcode, &[]);
        }
    }
    is_not_served(&mut door.stranger(), op::LOGIN, &wire::login("honest", 5000));
    is_not_served(&mut door.stranger(), op::OPEN, &wire::open(HONEST, 0, 1));
    // A stranger hears of no event.
    let mut end = door.stranger();
    let command = Command { opcode: op::ASYNC_EVENT, sequence: 1, epoch: 1, ..Command::default() };
    end.send(&command.bytes());
    let heard = end.overhear();
    assert!(heard.iter().all(|heard| is_refused(status_of(heard))), "{heard:?}");
}

fn commands_in_the_handshake(door: &Door, _: Victim) {
    for opcode in op::ALL {
        if ![op::LOGIN, op::KEEP_ALIVE, op::ASYNC_EVENT].contains(&opcode) {
            let mut end = door.stranger();
            let _ = door.authenticate(&mut end);
            end.lend_anew();
            is_not_served(&mut end, opcode, &[1; 48]);
        }
    }
    let mut end = door.stranger();
    let _ = door.authenticate(&mut end);
    end.lend_anew();
    is_not_served(&mut end, op::LOGIN, &wire::login("honest", 5000));
}

fn handshakes_that_break_a_rule(door: &Door, _: Victim) {
    for body in [vec![0; 48], vec![0xff; 48], vec![7; 47], vec![7; 49], vec![7; 1], vec![7; 4096]] {
        is_not_served(&mut door.stranger(), op::AUTHENTICATE, &body);
    }
    // Another target's handshake.
    let mut end = door.stranger();
    let keys = noise::Keys { target: [9; 32], ..door.keys.clone() };
    let prologue = noise::prologue(&end.asked, &end.accept, door.transport);
    let (_, first) = noise::begin(&keys, &prologue);
    is_not_served(&mut end, op::AUTHENTICATE, &first);
    // Another hello than the one that was sent.
    let mut end = door.stranger();
    let prologue = noise::prologue(&spoilt(&end.asked, 16, 0), &end.accept, door.transport);
    let (_, first) = noise::begin(&door.keys, &prologue);
    is_not_served(&mut end, op::AUTHENTICATE, &first);
}

/// The last message of a handshake of this end.
fn last_message(door: &Door, end: &mut End) -> Vec<u8> {
    let mut handshake = door.authenticate(end);
    end.lend_anew();
    noise::write(&mut handshake, &wire::login("rogue", 5000))
}

fn a_login_with_any_bit_flipped(door: &Door, _: Victim) {
    for at in (0..160).step_by(23) {
        let mut end = door.stranger();
        let message = last_message(door, &mut end);
        is_not_served(&mut end, op::LOGIN, &spoilt(&message, at, message[at] ^ 1));
    }
    // A host that the target does not know.
    let keys = noise::Keys { host: [5; 32], ..door.keys.clone() };
    let unknown = Door { keys, ..door.clone() };
    let mut end = door.stranger();
    let message = last_message(&unknown, &mut end);
    is_not_served(&mut end, op::LOGIN, &message);
}

fn a_login_of_another_handshake(door: &Door, _: Victim) {
    let mut one = door.stranger();
    let message = last_message(door, &mut one);
    let mut other = door.stranger();
    let _ = last_message(door, &mut other);
    is_not_served(&mut other, op::LOGIN, &message);
}

fn strangers_that_never_log_in(door: &Door, _: Victim) {
    let mut silent = door.stranger();
    let mut talks = door.stranger();
    let mut half = door.stranger();
    let _ = door.authenticate(&mut half);
    let until = Instant::now() + STRANGER;
    let mut sequence = 0;
    while !(silent.is_dead() && talks.is_dead() && half.is_dead()) {
        assert!(Instant::now() < until, "a stranger is still there");
        sequence += 1;
        let opcode = op::KEEP_ALIVE;
        talks.send(&Command { opcode, sequence, epoch: 1, ..Command::default() }.bytes());
        std::thread::sleep(Duration::from_millis(100));
        for end in [&mut silent, &mut talks, &mut half] {
            end.listen();
        }
    }
}

fn strangers_in_a_crowd(door: &Door, _: Victim) {
    let hello = Hello::admin(feature::AUTH).bytes();
    let crowd = (0..STRANGERS + STRANGERS / 2).map(|_| End::knock(&door.address, &hello));
    let mut inside: Vec<Box<End>> = crowd
        .filter_map(|knock| match knock {
            Knock::In(end) => Some(end),
            Knock::Refused(_) | Knock::Failed(_) => None,
        })
        .collect();
    assert!(!inside.is_empty(), "no stranger may come at all");
    // A stranger without a place is refused, or an older one has left for it.
    let until = Instant::now() + PROOF / 2;
    loop {
        inside.retain_mut(|end| {
            end.listen();
            !end.is_dead()
        });
        if inside.len() <= STRANGERS {
            break;
        }
        assert!(Instant::now() < until, "{} strangers have {STRANGERS} places", inside.len());
        std::thread::sleep(Duration::from_millis(1));
    }
}

fn a_session_of_somebody_else(door: &Door, victim: Victim) {
    // With its name alone.
    let hello =
        Hello { session: victim.session, epoch: victim.epoch + 1, ..Hello::admin(feature::AUTH) };
    let mut end = End::connect(&door.address, &hello);
    is_not_served(&mut end, op::LOGIN, &wire::login("honest", 5000));
    // With the proof of another host.
    let mut end = End::connect(&door.address, &hello);
    let message = last_message(door, &mut end);
    is_not_served(&mut end, op::LOGIN, &message);
    // A queue of it, with the secret of another session.
    with_rogue(door, |rogue| {
        // A number that no lane of the honest host has.
        let hello = Hello::io(victim.session, victim.epoch, 40, 0);
        let mut end = End::connect(&door.address, &hello);
        let asked = end.asked.clone();
        let accept = end.accept.clone();
        let with = Queue {
            secret: &rogue.secret,
            epoch: victim.epoch,
            queue: 40,
            asked: &asked,
            accept: &accept,
        };
        let message = rogue.self_test(&end, &[1; 16], &with.proof("initiator", &[1; 16]));
        end.send(&message);
        end.must_end();
        assert!(end.is_untouched());
    });
}

/// A hello may name any session. The target lets it in, but reveals nothing before a proof.
fn a_session_that_is_not_there(door: &Door, victim: Victim) {
    for (session, epoch) in [([3; 16], 2), (victim.session, victim.epoch)] {
        let hello = Hello { session, epoch, ..Hello::admin(feature::AUTH) };
        let mut end = End::connect(&door.address, &hello);
        let message = last_message(door, &mut end);
        is_not_served(&mut end, op::LOGIN, &message);
    }
}

fn bodies_without_a_seal(door: &Door, _: Victim) {
    for (opcode, body) in [
        (op::OPEN, wire::open(MINE, 0, 0)),
        (op::OPEN, wire::open(HONEST, 0, 1)),
        (op::LIST, Vec::new()),
        (op::CLOSE, Vec::new()),
        (op::LOGOUT, Vec::new()),
        (op::LOGIN, wire::login("honest", 5000)),
        (op::AUTHENTICATE, vec![1; 48]),
    ] {
        with_rogue(door, |rogue| {
            rogue.end.lend_anew();
            let in_capsule = u32::try_from(body.len()).expect("short");
            let command = Command { in_capsule, ..rogue.command(opcode) };
            rogue.end.send(&[command.bytes().as_slice(), &body].concat());
            let heard = rogue.end.hear();
            assert!(is_refused(status_of(&heard)), "{opcode:#x}: {heard:?}");
            assert!(rogue.end.is_untouched(), "{opcode:#x} got data");
        });
    }
}

fn seals_that_are_wrong(door: &Door, _: Victim) {
    let body = wire::open(MINE, 1, 0);
    for at in [0, 2, 28, 64, 100, 200, 223] {
        with_rogue(door, |rogue| {
            let command = rogue.command(op::OPEN);
            let message = rogue.sealed(command, &body);
            rogue.end.lend_anew();
            rogue.end.send(&spoilt(&message, at, message[at] ^ 1));
            let heard = rogue.end.hear();
            assert!(is_refused(status_of(&heard)), "byte {at}: {heard:?}");
            assert!(rogue.end.is_untouched(), "byte {at}: got data");
        });
    }
    // A message sent twice is answered once.
    with_rogue(door, |rogue| {
        let command = rogue.command(op::LIST);
        let message = rogue.sealed(command, &[]);
        rogue.end.send(&message);
        assert_eq!(status_of(&rogue.end.hear()), Some(status::OK));
        rogue.end.send(&message);
        let heard = rogue.end.hear();
        assert!(is_refused(status_of(&heard)), "a message that was replayed: {heard:?}");
    });
}

fn volumes_without_a_right(door: &Door, _: Victim) {
    with_rogue(door, |rogue| {
        for first in [0, 1, 2, 1 << 32, 1 << 63, u64::MAX] {
            let command = Command { lba: first, ..rogue.command(op::LIST) };
            let (_, _, list) = rogue.call(command, &[], 4000).expect("an answer to LIST");
            let names: Vec<&[u8]> = list[16..].chunks_exact(96).map(|e| &e[..64]).collect();
            assert!(names.iter().all(|n| n.starts_with(b"mine") || n.starts_with(b"readable")));
        }
        for (mode, take_over) in [(0, 0), (0, 1), (1, 0), (2, 0), (2, 1)] {
            let (status, _) = rogue.open(HONEST, mode, take_over);
            assert_eq!(status, status::NO_SUCH_VOLUME, "mode {mode}, take-over {take_over}");
        }
        for mode in [0, 2] {
            let (status, _) = rogue.open(READABLE, mode, 0);
            assert_ne!(status, status::OK, "to write what it may only read, mode {mode}");
        }
        assert_eq!(rogue.open(READABLE, 1, 0).0, status::OK);
    });
}

fn bodies_that_break_a_rule(door: &Door, _: Victim) {
    let good = wire::open(MINE, 1, 0);
    let cases = [
        ("no body", Vec::new()),
        ("a short body", good[..79].to_vec()),
        ("a long body", [good.as_slice(), &[0]].concat()),
        ("an unknown mode", spoilt(&good, 64, 3)),
        ("a strange take-over", spoilt(&good, 65, 2)),
        ("a reserved byte", spoilt(&good, 66, 1)),
        ("no name", spoilt(&good, 0, 0)),
        ("a name with a hole", spoilt(&good, 2, 0)),
        ("a name that is no text", spoilt(&good, 1, 0xff)),
        ("a control character", spoilt(&good, 1, 0x1b)),
    ];
    for (what, body) in cases {
        with_rogue(door, |rogue| {
            let command = rogue.command(op::OPEN);
            let status = rogue.call(command, &body, 512).map(|(status, ..)| status);
            assert!(is_refused(status), "{what}");
        });
    }
    // A buffer that is too small, and one that is not there.
    type Spoil = fn(Command) -> Command;
    let spoils: [Spoil; 4] = [
        |c| Command { length: 8, ..c },
        |c| Command { rkey: c.rkey ^ 0x5a5a, ..c },
        |c| Command { address: c.address + (1 << 40), ..c },
        |c| Command { address: 0, length: 0, rkey: 0, ..c },
    ];
    for spoil in spoils {
        with_rogue(door, |rogue| {
            let command = spoil(rogue.command(op::LIST));
            let message = rogue.sealed(command, &[]);
            rogue.end.lend_anew();
            rogue.end.send(&message);
            let _ = rogue.end.hear();
            assert!(rogue.end.is_untouched(), "{command:?}");
        });
    }
}

fn queues_without_a_proof(door: &Door, _: Victim) {
    with_rogue(door, |rogue| {
        let (status, handle) = rogue.open(MINE, 0, 0);
        assert_eq!(status, status::OK);
        // Commands before the self-test.
        let mut end = rogue.unproven(door, 5, 0);
        for opcode in [op::READ, op::FLUSH] {
            let remote = end.lent.remote(0);
            let command = Command {
                opcode,
                volume: handle,
                epoch: rogue.epoch,
                sequence: 1,
                count: u64::from(opcode == op::READ),
                address: if opcode == op::READ { remote.addr } else { 0 },
                length: if opcode == op::READ { BLOCK } else { 0 },
                rkey: if opcode == op::READ { remote.rkey.0 } else { 0 },
                ..Command::default()
            };
            end.send(&command.bytes());
            assert_eq!(status_of(&end.hear()), Some(status::NOT_READY), "opcode {opcode:#x}");
        }
        assert!(end.is_untouched());
        drop(end);
        let nonce = [4; 16];
        let proof = |end: &End, secret: &[u8; 32], epoch, queue, side| {
            let (asked, accept) = (end.asked.clone(), end.accept.clone());
            Queue { secret, epoch, queue, asked: &asked, accept: &accept }.proof(side, &nonce)
        };
        let epoch = rogue.epoch;
        for case in 0..6 {
            let mut end = rogue.unproven(door, 6, 0);
            let proof = match case {
                0 => [0; 32],
                1 => proof(&end, &[0; 32], epoch, 6, "initiator"),
                2 => proof(&end, &rogue.secret, epoch, 7, "initiator"),
                3 => proof(&end, &rogue.secret, epoch + 1, 6, "initiator"),
                4 => proof(&end, &rogue.secret, epoch, 6, "target"),
                _ => {
                    // The proof of another connection of the same queue.
                    let other = rogue.unproven(door, 6, 0);
                    proof(&other, &rogue.secret, epoch, 6, "initiator")
                }
            };
            let message = rogue.self_test(&end, &nonce, &proof);
            end.send(&message);
            end.must_end();
            assert!(end.is_untouched(), "case {case}");
        }
        // A self-test without a proof.
        let mut end = rogue.unproven(door, 6, 0);
        let message = rogue.self_test(&end, &nonce, &[0; 32]);
        let bare = spoilt(&message[..64], 36, 0);
        end.send(&bare);
        let heard = end.hear();
        assert!(is_refused(status_of(&heard)), "{heard:?}");
        assert!(end.is_untouched());
        // A queue that offers no proof.
        let hello = Hello { features: 0, ..Hello::io(rogue.session, rogue.epoch, 6, 0) };
        if let Knock::In(mut end) = End::knock(&door.address, &hello.bytes()) {
            let message = rogue.self_test(&end, &nonce, &[0; 32]);
            end.send(&spoilt(&message[..64], 36, 0));
            let heard = end.hear();
            assert!(is_refused(status_of(&heard)), "a queue without a proof: {heard:?}");
        }
        // The queue is still free for the one that proves itself.
        let mut queue = rogue.queue(door, 6, 0);
        let command = queue.command(op::READ, handle, 0, 1);
        assert_eq!(queue.ask(&command.bytes()), Some(status::OK));
    });
}

fn commands_that_break_a_rule(door: &Door, _: Victim) {
    type Spoil = fn(&mut RogueQueue, u32) -> Vec<u8>;
    fn read(queue: &mut RogueQueue, handle: u32) -> [u8; wire::COMMAND] {
        queue.command(op::READ, handle, 0, 8).bytes()
    }
    let cases: [(&str, Spoil); 14] = [
        ("opcode 0", |q, v| spoilt(&read(q, v), 0, 0)),
        ("an unknown opcode", |q, v| spoilt(&read(q, v), 0, 0x77)),
        ("an unknown flag", |q, v| spoilt(&read(q, v), 1, 0x80)),
        ("a tag beyond the depth", |q, v| {
            let (low, high) = ((q.depth + 1).to_le_bytes(), 3);
            let bytes = spoilt(&read(q, v), 2, low[0]);
            spoilt(&bytes, high, low[1])
        }),
        ("the largest tag", |q, v| spoilt(&spoilt(&read(q, v), 2, 255), 3, 255)),
        ("a digest without its flag", |q, v| spoilt(&read(q, v), 32, 1)),
        ("a reserved byte", |q, v| spoilt(&read(q, v), 40, 1)),
        ("data that is not there", |q, v| spoilt(&read(q, v), 36, 16)),
        ("data that was not announced", |q, v| [read(q, v).as_slice(), &[1]].concat()),
        ("a part of a capsule", |q, v| read(q, v)[..63].to_vec()),
        ("one byte", |_, _| vec![1]),
        ("more data than was agreed", |q, v| {
            let command = Command {
                in_capsule: 8192,
                address: 0,
                length: 0,
                rkey: 0,
                ..q.command(op::WRITE, v, 0, 16)
            };
            [command.bytes().as_slice(), &[1; 8192]].concat()
        }),
        ("a descriptor that wraps around", |q, v| {
            let command = q.command(op::READ, v, 0, 8);
            Command { address: u64::MAX - 100, ..command }.bytes().to_vec()
        }),
        ("a key without a length", |q, v| {
            let command = q.command(op::READ, v, 0, 8);
            Command { length: 0, ..command }.bytes().to_vec()
        }),
    ];
    for (what, spoil) in cases {
        with_queue(door, 0, |_, queue, handle| {
            queue.end.lend_anew();
            let message = spoil(queue, handle);
            assert_eq!(queue.ask(&message), None, "{what}: the connection must end");
            assert!(queue.end.is_untouched(), "{what}");
        });
    }
    // A message with one tag twice.
    with_queue(door, feature::CAPSULE_LISTS, |_, queue, handle| {
        let one = queue.command(op::READ, handle, 0, 8).bytes();
        let message = [one, one].concat();
        queue.end.send(&message);
        queue.end.must_end();
    });
}

fn commands_that_are_not_allowed(door: &Door, _: Victim) {
    type Spoil = fn(Command) -> Command;
    let cases: [(&str, Spoil); 12] = [
        ("no volume", |c| Command { volume: 0, ..c }),
        ("the largest handle", |c| Command { volume: u32::MAX, ..c }),
        ("a block behind the last", |c| Command { lba: MINE_BLOCKS, ..c }),
        ("over the end", |c| Command { lba: MINE_BLOCKS - 7, ..c }),
        ("the largest block", |c| Command { lba: u64::MAX, ..c }),
        ("a block that wraps around", |c| Command { lba: u64::MAX / 512 + 1, ..c }),
        ("no blocks", |c| Command { count: 0, ..c }),
        ("the most blocks", |c| Command { count: u64::MAX, ..c }),
        ("fewer bytes than blocks", |c| Command { length: 512, ..c }),
        ("another epoch", |c| Command { epoch: c.epoch + 1, ..c }),
        ("an admin command", |c| Command { opcode: op::OPEN, ..c }),
        ("a self-test with a tag of a block", |c| Command { opcode: op::SELF_TEST, ..c }),
    ];
    for opcode in [op::READ, op::WRITE] {
        for (what, spoil) in cases {
            with_queue(door, 0, |_, queue, handle| {
                let command = spoil(queue.command(opcode, handle, 0, 8));
                queue.end.lend_anew();
                let status = queue.ask(&command.bytes());
                assert!(is_refused(status), "opcode {opcode:#x}, {what}");
                assert!(queue.end.is_untouched(), "{what}");
            });
        }
    }
    // Every other handle.
    with_queue(door, 0, |_, queue, handle| {
        for other in (1..=64).filter(|other| *other != handle) {
            let command = queue.command(op::READ, other, 0, 8);
            assert!(is_refused(queue.ask(&command.bytes())), "handle {other}");
        }
    });
    // Writes to a volume that was opened for reading.
    with_rogue(door, |rogue| {
        let (status, handle) = rogue.open(READABLE, 1, 0);
        assert_eq!(status, status::OK);
        let mut queue = rogue.queue(door, 0, 0);
        for opcode in [op::WRITE, op::DISCARD, op::WRITE_ZEROES] {
            let command = queue.command(opcode, handle, 0, 8);
            let has_data = opcode == op::WRITE;
            let bare = Command { address: 0, length: 0, rkey: 0, ..command };
            let command = if has_data { command } else { bare };
            assert!(is_refused(queue.ask(&command.bytes())), "opcode {opcode:#x}");
        }
    });
}

fn memory_of_the_target(door: &Door, _: Victim) {
    let mut random = Random::new(17);
    for round in 0_u32..24 {
        with_queue(door, 0, |_, queue, _| {
            let own = queue.end.lent.remote(0);
            // Keys near this host's own: devices often assign keys in order.
            let near = own.rkey.0.wrapping_add(round.wrapping_sub(12) << 8);
            let rkey = if round % 2 == 0 { near } else { narrow(random.below(1 << 32)) };
            let addr = if round % 3 == 0 { own.addr } else { random.below(1 << 47) & !4095 };
            match round % 3 {
                0 => queue.end.write_remote(addr, rkey, &[0xee; 4096]),
                1 => queue.end.read_remote(addr, rkey),
                // iWARP has no immediates.
                _ if door.transport == Transport::Iwarp => {
                    queue.end.write_remote(addr, rkey, &[0xee; 64]);
                }
                _ => queue.end.write_with_imm(addr, rkey, round),
            }
            // The target serves no READ. A device may keep one back instead of sending it.
            if round % 3 == 1 && door.transport != Transport::Tcp {
                let heard = queue.end.overhear();
                return assert!(heard.iter().all(|h| matches!(h, Heard::End(_))), "{heard:?}");
            }
            queue.end.must_end();
        });
    }
    // Keys of memory that the host took back, or never had.
    for opcode in [op::READ, op::WRITE] {
        with_queue(door, 0, |_, queue, handle| {
            let command = queue.command(opcode, handle, 0, 16);
            queue.end.lend_anew();
            let _ = queue.ask(&command.bytes());
            assert!(queue.end.is_untouched(), "a key that was taken back");
        });
    }
}

fn a_peer_that_takes_nothing(door: &Door, _: Victim) {
    with_queue(door, 0, |_, queue, handle| {
        for tag in 0..queue.depth {
            let command = queue.command(op::READ, handle, 0, 16);
            queue.end.send(&Command { tag, ..command }.bytes());
        }
        // The peer neither polls nor reads.
        std::thread::sleep(Duration::from_secs(3));
    });
}

fn random_bytes(door: &Door, _: Victim) {
    let seed = std::env::var("RBLK_SEED").ok().and_then(|s| s.parse().ok()).unwrap_or(4711);
    println!("random_bytes: RBLK_SEED={seed}");
    let mut random = Random::new(seed);
    for _ in 0..40 {
        with_queue(door, feature::CAPSULE_LISTS | feature::DATA_LISTS, |_, queue, handle| {
            for _ in 0..20 {
                let opcode = op::ALL[random.index(op::ALL.len())];
                let command = queue.command(opcode, handle, random.below(MINE_BLOCKS), 8);
                let tag = narrow(random.below(u64::from(queue.depth) + 1));
                let mut message = Command { tag, ..command }.bytes().to_vec();
                for _ in 0..random.below(4) {
                    let at = random.index(message.len());
                    message[at] = random.bits().to_le_bytes()[7];
                }
                if random.below(4) == 0 {
                    message.resize(random.index(9000) + 1, 0xab);
                }
                queue.end.send(&message);
                let heard = queue.end.overhear();
                if queue.end.is_dead() || heard.iter().any(|h| matches!(h, Heard::End(_))) {
                    return;
                }
            }
        });
    }
}
