//! The library `rblk-client` with real targets: data, queues in threads of their own, targets that
//! are killed, hosts that are fenced, and handles that are dropped in every state.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use rblk_client::{
    Buffer, Completion, Config, OpenError, Options, Queue, Reason, Request, State, Volume,
};
use rblk_config::{ByteSize, OnLoss, Paths};
use rblk_rig::seed::Random;
use rblk_tests::bed::pattern;
use rblk_tests::program::{DEADLINE, Target, wait_for};
use rblk_tests::relay::Relay;

#[path = "../../initiator/client/examples/tour.rs"]
#[allow(dead_code)] // its `main`
mod tour;

const BLOCK: usize = 4096;
const MIB: usize = 1 << 20;
const MOMENT: Duration = Duration::from_millis(50);

/// A target with a volume `v` in a file, and the arguments to start it again.
fn start(dir: &Path, cache: &str) -> (Target, Vec<String>) {
    let (path, file) = (dir.join("v.img"), dir.join("target.toml"));
    std::fs::write(&path, vec![0; 4 * MIB]).unwrap();
    let text = format!(
        "write_back_delay = '60s'\n[[volume]]\nname = 'v'\nstore = 'file'\npath = '{}'\ncache = '{cache}'\n",
        path.display()
    );
    std::fs::write(&file, text).unwrap();
    let args = vec!["--config".to_owned(), file.display().to_string()];
    (Target::start(dir, &words(&args)), args)
}

fn words(args: &[String]) -> Vec<&str> {
    args.iter().map(String::as_str).collect()
}

fn config(target: &Target) -> Config {
    let mut config = Config::new(target.address.to_string(), "v");
    config.queue_depth = 8;
    config.max_io = ByteSize(64 << 10);
    config.reconnect_delay = rblk_config::Duration::from_millis(20);
    config
}

fn open(target: &Target) -> Volume {
    Options::new(config(target)).open().unwrap()
}

/// Waits for one completion.
#[track_caller]
fn next(queue: &mut Queue) -> Completion {
    let mut done = Vec::new();
    let deadline = Instant::now() + DEADLINE;
    while queue.wait(&mut done, Duration::from_secs(1)).unwrap() == 0 {
        assert!(Instant::now() < deadline, "no completion");
    }
    assert_eq!(done.len(), 1);
    done.pop().unwrap()
}

#[track_caller]
fn write(queue: &mut Queue, offset: usize, bytes: &[u8]) {
    let mut buffer = queue.buffer().unwrap();
    buffer.write(0, bytes);
    queue.submit(Request::write(buffer, offset as u64, bytes.len())).unwrap();
    assert_eq!(next(queue).result, Ok(bytes.len()));
}

#[track_caller]
fn read(queue: &mut Queue, offset: usize, len: usize) -> Vec<u8> {
    let mut buffer = queue.buffer().unwrap();
    buffer.write(0, &vec![0xee; len]);
    queue.submit(Request::read(buffer, offset as u64, len)).unwrap();
    let done = next(queue);
    assert_eq!(done.result, Ok(len));
    bytes(&done.buffer.unwrap(), len)
}

fn bytes(buffer: &Buffer, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    buffer.read(0, &mut bytes);
    bytes
}

/// Checks that no session is left because each logged out. None would end by itself: a lease is
/// longer.
#[track_caller]
fn assert_ended(target: &Target) {
    wait_for("the end of the sessions", || target.status().sessions.is_empty().then_some(()));
}

#[test]
fn the_example_of_the_documentation_runs() {
    let dir = tempfile::tempdir().unwrap();
    let (target, _) = start(dir.path(), "none");
    assert_eq!(tour::tour(&target.address.to_string(), "v").unwrap(), 7);
    assert_ended(&target);
    let lines = include_str!("../../initiator/client/examples/tour.rs").lines().count();
    assert!(lines <= 45, "{lines} lines are no short example");
}

/// Random requests over a part of the volume, many at once, compared with a model of it. The ranges
/// of requests under way do not overlap.
fn exercise(queue: &mut Queue, first: usize, blocks: usize, seed: u64, rounds: usize) -> Vec<u8> {
    let mut random = Random::new(seed);
    let mut below = |most: usize| usize::try_from(random.below(most as u64)).unwrap();
    let mut model = vec![0u8; blocks * BLOCK];
    for round in 0..rounds {
        let mut at = below(3);
        let mut reads = Vec::new();
        for token in 0..queue.depth() as u64 {
            let count = 1 + below(4);
            if at + count > blocks {
                break;
            }
            let (from, len) = (at * BLOCK, count * BLOCK);
            let (offset, range) = ((first * BLOCK + from) as u64, from..from + len);
            at += count + below(blocks / 8);
            let request = match below(6) {
                0 => Request::flush(),
                1 => {
                    model[range].fill(0);
                    Request::write_zeroes(offset, len as u64)
                }
                2 | 3 => {
                    let data = pattern(seed ^ (round as u64 * 100 + token), len);
                    let mut buffer = queue.buffer().unwrap();
                    buffer.write(0, &data);
                    model[range].copy_from_slice(&data);
                    Request::write(buffer, offset, len)
                }
                _ => {
                    reads.push((token, range));
                    Request::read(queue.buffer().unwrap(), offset, len)
                }
            };
            queue.submit(request.with_token(token)).unwrap();
        }
        let mut done = Vec::new();
        while queue.under_way() > 0 {
            queue.wait(&mut done, Duration::from_secs(1)).unwrap();
        }
        for completion in &done {
            assert!(completion.result.is_ok(), "{completion:?}");
        }
        for (token, range) in reads {
            let done = done.iter().find(|done| done.token == token).unwrap();
            let found = bytes(done.buffer.as_ref().unwrap(), range.len());
            assert!(found == model[range], "round {round}, token {token}");
        }
    }
    model
}

#[test]
fn queues_in_threads_of_their_own_read_what_was_written() {
    for cache in ["none", "write-back"] {
        let dir = tempfile::tempdir().unwrap();
        let (target, _) = start(dir.path(), cache);
        let mut config = config(&target);
        config.queues = Some(2);
        let mut volume = Options::new(config).open().unwrap();
        assert_eq!(volume.size_bytes(), 4 * MIB as u64);
        assert_eq!((volume.max_io(), volume.is_read_only()), (64 << 10, false));
        let queues: Vec<_> = std::iter::from_fn(|| volume.queue()).collect();
        assert_eq!(queues.len(), 2);
        let threads = queues.into_iter().enumerate().map(|(number, mut queue)| {
            std::thread::spawn(move || {
                let model = exercise(&mut queue, number * 512, 512, number as u64, 60);
                (number, model, queue)
            })
        });
        let threads: Vec<_> = threads.collect();
        for thread in threads {
            let (number, model, mut queue) = thread.join().unwrap();
            for at in (0..model.len()).step_by(64 << 10) {
                let found = read(&mut queue, number * 512 * BLOCK + at, 64 << 10);
                assert!(found == model[at..at + (64 << 10)], "queue {number} at {at}");
            }
            let counts = queue.counts();
            assert_eq!((counts.errors, counts.copied_bytes), (0, 0), "{counts:?}");
            assert!(counts.answered > 60 && counts.read_bytes > 0);
        }
        volume.close().unwrap();
        assert_ended(&target);
    }
}

/// Two addresses are used at once, and each dies in turn while both carry requests. No request
/// fails or reads wrong data, the target is never lost, and the address is used again.
#[test]
fn one_of_two_ways_dies_again_and_again() {
    for cache in ["none", "write-back"] {
        let dir = tempfile::tempdir().unwrap();
        let (target, _) = start(dir.path(), cache);
        let relays = [Relay::new(&target.address), Relay::new(&target.address)];
        relays.iter().for_each(Relay::listen);
        let mut config = config(&target);
        config.target = relays.iter().map(|relay| relay.address.to_string()).collect();
        (config.paths, config.queues, config.lanes) = (Paths::All, Some(2), Some(1));
        let mut volume = Options::new(config).open().unwrap();
        let queues: Vec<_> = std::iter::from_fn(|| volume.queue()).collect();
        let is_over = Arc::new(AtomicBool::new(false));
        let threads = queues.into_iter().enumerate().map(|(number, mut queue)| {
            let is_over = Arc::clone(&is_over);
            std::thread::spawn(move || {
                let mut seed = number as u64;
                while !is_over.load(Ordering::Relaxed) {
                    let model = exercise(&mut queue, number * 512, 512, seed, 20);
                    seed += 2;
                    for at in (0..model.len()).step_by(64 << 10) {
                        let found = read(&mut queue, number * 512 * BLOCK + at, 64 << 10);
                        assert!(found == model[at..at + (64 << 10)], "queue {number} at {at}");
                    }
                    // The next round begins with zeroes.
                    queue
                        .submit(Request::write_zeroes((number * 512 * BLOCK) as u64, 2 << 20))
                        .unwrap();
                    assert_eq!(next(&mut queue).result, Ok(0));
                }
                queue.counts()
            })
        });
        let threads: Vec<_> = threads.collect();
        // An admin connection and two queues for each way.
        let both_after = |epoch: u32| {
            let sessions = target.status().sessions;
            assert_eq!(volume.state(), State::Connected);
            // A probe has a session for a moment, too, and opens nothing.
            let session = sessions.iter().find(|session| !session.volumes.is_empty());
            let session = session.expect("the session");
            (session.connections == 6 && session.epoch > epoch).then_some(session.epoch)
        };
        let mut epoch = wait_for("both ways", || both_after(1));
        for round in 0..6 {
            let relay = &relays[round % 2];
            relay.cut();
            // The way is tried again, and its address refuses for a while.
            if round >= 4 {
                relay.refuse();
                relay.cut();
                std::thread::sleep(4 * MOMENT);
                relay.listen();
            }
            epoch = wait_for("both ways again", || both_after(epoch));
        }
        is_over.store(true, Ordering::Relaxed);
        let counts: Vec<_> = threads.into_iter().map(|thread| thread.join().unwrap()).collect();
        let lost: u64 = counts.iter().map(|counts| counts.paths_lost).sum();
        assert!(lost >= 12, "{counts:?}");
        assert!(counts.iter().all(|counts| counts.errors == 0), "{counts:?}");
        volume.close().unwrap();
        assert_ended(&target);
    }
}

#[test]
fn no_end_copies_the_data_of_a_cached_read() {
    let dir = tempfile::tempdir().unwrap();
    let (target, _) = start(dir.path(), "write-back");
    let mut volume = open(&target);
    let mut queue = volume.queue().unwrap();
    let data = pattern(3, 64 << 10);
    write(&mut queue, 0, &data);
    let before = target.status().total;
    for _ in 0..20 {
        assert!(read(&mut queue, 0, data.len()) == data);
        assert!(read(&mut queue, BLOCK, BLOCK) == data[BLOCK..2 * BLOCK]);
    }
    // Larger than a capsule.
    write(&mut queue, 0, &data);
    let after = target.status().total;
    assert!(after.reads >= before.reads + 40, "{after:?}");
    assert_eq!(after.copied_bytes, before.copied_bytes, "at the target");
    assert_eq!(queue.counts().copied_bytes, 0, "here");
}

#[test]
fn requests_wait_for_a_target_that_was_killed() {
    let dir = tempfile::tempdir().unwrap();
    let (mut target, args) = start(dir.path(), "none");
    let mut volume = open(&target);
    let mut queue = volume.queue().unwrap();
    let data = pattern(1, BLOCK);
    write(&mut queue, 0, &data);
    for round in 1..4 {
        target.kill();
        let mut buffer = queue.buffer().unwrap();
        buffer.write(0, &pattern(round, BLOCK));
        queue.submit(Request::write(buffer, BLOCK as u64, BLOCK).with_token(round)).unwrap();
        let buffer = queue.buffer().unwrap();
        queue.submit(Request::read(buffer, 0, BLOCK).with_token(100)).unwrap();
        let mut done = Vec::new();
        queue.wait(&mut done, MOMENT).unwrap();
        wait_for("the loss", || (volume.state() == State::Reconnecting).then_some(()));
        assert_eq!((done.len(), queue.under_way()), (0, 2));
        target.start_again(dir.path(), &words(&args));
        let deadline = Instant::now() + DEADLINE;
        while queue.under_way() > 0 {
            assert!(Instant::now() < deadline, "{queue:?}");
            queue.wait(&mut done, MOMENT).unwrap();
        }
        for done in done {
            assert_eq!(done.result, Ok(BLOCK));
            if done.token == 100 {
                assert!(bytes(&done.buffer.unwrap(), BLOCK) == data);
            }
        }
        assert!(read(&mut queue, BLOCK, BLOCK) == pattern(round, BLOCK));
        // Another thread sets the state.
        wait_for("the path", || (volume.state() == State::Connected).then_some(()));
    }
    assert!(queue.counts().paths_lost >= 3);
}

#[test]
fn retained_writes_survive_a_target_that_loses_its_memory() {
    for retain in [true, false] {
        let dir = tempfile::tempdir().unwrap();
        let (mut target, args) = start(dir.path(), "write-back");
        let mut config = config(&target);
        config.queues = Some(2);
        config.retain = ByteSize(if retain { 2 << 20 } else { 0 });
        config.on_loss = OnLoss::Once;
        let mut volume = Options::new(config).open().unwrap();
        let (mut queue, mut other) = (volume.queue().unwrap(), volume.queue().unwrap());
        let data = pattern(9, BLOCK);
        write(&mut queue, 0, &data);
        assert_eq!(volume.unflushed_writes(), 1);
        target.kill();
        target.start_again(dir.path(), &words(&args));
        // Both queues must be driven: the retained writes of each are needed.
        let deadline = Instant::now() + DEADLINE;
        queue.submit(Request::flush()).unwrap();
        let mut done = Vec::new();
        while done.is_empty() {
            assert!(Instant::now() < deadline, "no answer");
            queue.wait(&mut done, MOMENT).unwrap();
            other.poll(&mut Vec::new()).unwrap();
        }
        assert_eq!(done[0].result.is_ok(), retain, "{done:?}");
        assert_eq!(volume.losses(), u64::from(!retain));
        if retain {
            assert!(read(&mut queue, 0, BLOCK) == data);
        }
    }
}

/// A dropped queue takes its retained writes along, and the order of the writes. They count as
/// lost, and no older data is written over newer data.
#[test]
fn writes_of_a_dropped_queue_are_not_taken_for_kept() {
    let dir = tempfile::tempdir().unwrap();
    let (mut target, args) = start(dir.path(), "write-back");
    let mut config = config(&target);
    config.queues = Some(2);
    config.retain = ByteSize(2 << 20);
    config.on_loss = OnLoss::Once;
    let mut volume = Options::new(config).open().unwrap();
    let (mut queue, mut other) = (volume.queue().unwrap(), volume.queue().unwrap());
    write(&mut queue, 0, &pattern(9, BLOCK));
    let newer = pattern(10, BLOCK);
    let mut buffer = other.buffer().unwrap();
    buffer.write(0, &newer);
    other.submit(Request::write(buffer, 0, BLOCK).durable()).unwrap();
    assert_eq!(next(&mut other).result, Ok(BLOCK));
    drop(other);
    target.kill();
    target.start_again(dir.path(), &words(&args));
    queue.submit(Request::flush()).unwrap();
    assert_eq!(next(&mut queue).result.unwrap_err().errno(), 5);
    assert_eq!(volume.losses(), 1);
    assert!(read(&mut queue, 0, BLOCK) == newer, "older data was written over durable data");
    // The loss is reported once. The remaining queue works on, and retains.
    let kept = pattern(11, BLOCK);
    write(&mut queue, 0, &kept);
    target.kill();
    target.start_again(dir.path(), &words(&args));
    queue.submit(Request::flush()).unwrap();
    assert_eq!(next(&mut queue).result, Ok(0));
    assert!(read(&mut queue, 0, BLOCK) == kept);
}

/// The next user of the volume does not know of unflushed writes, so a close leaves none.
#[test]
fn writes_are_durable_when_the_volume_is_closed() {
    for close in [true, false] {
        let dir = tempfile::tempdir().unwrap();
        let (mut target, _) = start(dir.path(), "write-back");
        let mut volume = open(&target);
        let mut queue = volume.queue().unwrap();
        let data = pattern(11, BLOCK);
        write(&mut queue, BLOCK, &data);
        assert_eq!(volume.unflushed_writes(), 1);
        drop(queue);
        if close {
            volume.close().unwrap();
        } else {
            drop(volume);
        }
        assert_ended(&target);
        target.kill();
        let file = std::fs::read(dir.path().join("v.img")).unwrap();
        assert!(file[BLOCK..2 * BLOCK] == data, "close: {close}");
    }
}

#[test]
fn a_host_that_lost_its_volume_is_fenced() {
    let dir = tempfile::tempdir().unwrap();
    let (target, _) = start(dir.path(), "none");
    let options = |id| Options::new(config(&target)).host_id([id; 16]);
    let mut volume = options(1).open().unwrap();
    let mut queue = volume.queue().unwrap();
    write(&mut queue, 0, &pattern(1, BLOCK));
    let in_use: OpenError = options(2).open().unwrap_err();
    assert!(in_use.to_string().contains("in use"), "{in_use}");
    let mut taken = options(2).take_over().open().unwrap();
    let mut taker = taken.queue().unwrap();
    write(&mut taker, 0, &pattern(2, BLOCK));
    // Every attempt fails.
    for _ in 0..3 {
        let buffer = queue.buffer().unwrap();
        queue.submit(Request::write(buffer, 0, BLOCK)).unwrap();
        let done = next(&mut queue);
        let error = done.result.unwrap_err();
        assert!(error.is_fenced() && done.buffer.is_some(), "{error}");
    }
    // Queues are fenced a moment before the volume's state changes.
    wait_for("a state", || (volume.state() == State::Fenced).then_some(()));
    assert!(read(&mut taker, 0, BLOCK) == pattern(2, BLOCK));
}

#[test]
fn a_refused_request_comes_back_with_its_buffer() {
    let dir = tempfile::tempdir().unwrap();
    let (target, _) = start(dir.path(), "none");
    let mut config = config(&target);
    config.queues = Some(2);
    let mut volume = Options::new(config).spare_buffers(1).open().unwrap();
    let (mut queue, mut other) = (volume.queue().unwrap(), volume.queue().unwrap());
    assert_eq!(queue.free_buffers(), 9, "depth and the spare one");
    let mut refuse = |request: Request| {
        let refused = queue.submit(request).unwrap_err();
        assert!(!refused.to_string().is_empty());
        (refused.reason, refused.request.into_buffer().is_some())
    };
    let buffer = || other.buffer().unwrap();
    let mut buffer = buffer;
    assert_eq!(refuse(Request::read(buffer(), 0, BLOCK)), (Reason::ForeignBuffer, true));
    assert_eq!(refuse(Request::discard(0, 0)), (Reason::Empty, false));
    let odd = Reason::NotWholeBlocks { offset: 1, len: 4096, block: volume.block_size() };
    assert_eq!(refuse(Request::write_zeroes(1, 4096)), (odd, false));
    let mine = queue.buffer().unwrap();
    let refused = queue.submit(Request::write(mine, 0, (64 << 10) + BLOCK)).unwrap_err();
    assert!(matches!(refused.reason, Reason::TooLong { .. }), "{refused}");
    let mut buffer = refused.request.into_buffer();
    for _ in 0..queue.depth() {
        let buffer = buffer.take().or_else(|| queue.buffer()).unwrap();
        queue.submit(Request::read(buffer, 0, BLOCK)).unwrap();
    }
    // All tags are used, but a spare buffer is left.
    let spare = queue.buffer().unwrap();
    assert!(queue.buffer().is_none());
    let refused = queue.submit(Request::read(spare, 0, BLOCK)).unwrap_err();
    assert_eq!(refused.reason, Reason::Full { depth: 8 });
    // Beyond the end: the target refuses.
    while queue.under_way() > 0 {
        queue.wait(&mut Vec::new(), MOMENT).unwrap();
    }
    let buffer = refused.request.into_buffer().unwrap();
    queue.submit(Request::read(buffer, 4 * MIB as u64, BLOCK)).unwrap();
    assert!(next(&mut queue).result.is_err());
    assert_eq!(queue.free_buffers(), 9);
}

#[test]
fn a_thread_may_sleep_among_descriptors_of_its_own() {
    use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
    let dir = tempfile::tempdir().unwrap();
    let (target, _) = start(dir.path(), "none");
    let mut volume = open(&target);
    let mut queue = volume.queue().unwrap();
    let (mut done, mut slept) = (Vec::new(), 0);
    for round in 0..50u64 {
        let buffer = queue.buffer().unwrap();
        queue.submit(Request::read(buffer, round * 4096, BLOCK).with_token(round)).unwrap();
        let deadline = Instant::now() + DEADLINE;
        while queue.poll(&mut done).unwrap() == 0 {
            assert!(Instant::now() < deadline, "no completion");
            let Some(longest) = queue.arm().unwrap() else { continue };
            let ms = u16::try_from(longest.as_millis().max(1)).unwrap_or(u16::MAX);
            let mut fds = [PollFd::new(queue.event_fd(), PollFlags::POLLIN)];
            slept += poll(&mut fds, PollTimeout::from(ms)).unwrap();
        }
        assert_eq!((done.len(), done[0].token), (1, round));
        assert!(done.pop().unwrap().result.is_ok());
    }
    assert!(slept > 0, "the descriptor never woke anybody");
}

/// Without keys no two users count as the same one, not even programs of one host.
#[test]
fn two_users_of_one_host_do_not_fence_each_other_by_accident() {
    let dir = tempfile::tempdir().unwrap();
    let (mut target, args) = start(dir.path(), "none");
    let mut volume = open(&target);
    let mut queue = volume.queue().unwrap();
    write(&mut queue, 0, &pattern(1, BLOCK));
    // The first user waits for its target, and tries again only after a long delay.
    target.kill();
    queue.wait(&mut Vec::new(), MOMENT).unwrap();
    wait_for("the loss", || (volume.state() == State::Reconnecting).then_some(()));
    let slow = {
        let mut config = config(&target);
        config.reconnect_delay = rblk_config::Duration::from_secs(5);
        config
    };
    target.start_again(dir.path(), &words(&args));
    let refused = Options::new(slow).open().unwrap_err();
    assert!(refused.to_string().contains("in use"), "{refused}");
    assert!(read(&mut queue, 0, BLOCK) == pattern(1, BLOCK));
    wait_for("the path", || (volume.state() == State::Connected).then_some(()));
}

/// The state of a request in which everything is dropped.
#[derive(Clone, Copy, Debug)]
enum At {
    Opened,
    Submitted,
    Sent,
    Completed,
    TargetLost,
    Reconnected,
}

/// The parts, dropped one after the other.
#[derive(Clone, Copy, PartialEq, Debug)]
enum Part {
    Volume,
    Queue,
    Buffer,
    Completion,
}

/// Every order of four parts.
fn orders() -> Vec<[Part; 4]> {
    use Part::{Buffer, Completion, Queue, Volume};
    let parts = [Volume, Queue, Buffer, Completion];
    let mut orders = Vec::new();
    for a in parts {
        for b in parts {
            for c in parts {
                for d in parts {
                    let order = [a, b, c, d];
                    if parts.iter().all(|part| order.contains(part)) {
                        orders.push(order);
                    }
                }
            }
        }
    }
    orders
}

#[test]
fn everything_may_be_dropped_in_every_state_and_order() {
    let dir = tempfile::tempdir().unwrap();
    let (mut target, args) = start(dir.path(), "none");
    let states =
        [At::Opened, At::Submitted, At::Sent, At::Completed, At::TargetLost, At::Reconnected];
    let runs = AtomicUsize::new(0);
    for at in states {
        // States with a killed target take long: only a few orders.
        let step = if matches!(at, At::TargetLost | At::Reconnected) { 11 } else { 1 };
        for order in orders().into_iter().step_by(step) {
            drop_all(&mut target, &args, dir.path(), at, order);
            runs.fetch_add(1, Ordering::Relaxed);
            if matches!(at, At::TargetLost) {
                target.start_again(dir.path(), &words(&args));
            }
            assert_ended(&target);
        }
    }
    assert_eq!(runs.into_inner(), 4 * 24 + 2 * 3);
}

fn drop_all(target: &mut Target, args: &[String], dir: &Path, at: At, order: [Part; 4]) {
    let mut options = config(target);
    options.detect = rblk_config::Duration::from_millis(500);
    // A user that lost its target did not log out, so only the same holder gets in at once.
    let mut volume = Options::new(options).host_id([7; 16]).open().unwrap();
    let mut queue = volume.queue().unwrap();
    let kept = queue.buffer();
    let mut done = Vec::new();
    if !matches!(at, At::Opened) {
        for token in 0..3 {
            let buffer = queue.buffer().unwrap();
            queue.submit(Request::write(buffer, token * 4096, BLOCK)).unwrap();
        }
    }
    match at {
        At::Opened | At::Submitted => {}
        At::Sent => drop(queue.poll(&mut done)),
        At::Completed => {
            while done.is_empty() {
                queue.wait(&mut done, MOMENT).unwrap();
            }
        }
        At::TargetLost | At::Reconnected => {
            target.kill();
            queue.wait(&mut done, MOMENT).unwrap();
            if matches!(at, At::Reconnected) {
                target.start_again(dir, &words(args));
                wait_for("the target", || {
                    queue.poll(&mut done).unwrap();
                    (queue.under_way() == 0).then_some(())
                });
            }
        }
    }
    let (mut volume, mut queue, mut kept) = (Some(volume), Some(queue), kept);
    for part in order {
        match part {
            Part::Volume => drop(volume.take()),
            Part::Queue => drop(queue.take()),
            Part::Buffer => {
                // Its memory outlives the parts dropped before it.
                let mut buffer = kept.take().unwrap();
                buffer.write(0, &[5; BLOCK]);
                assert!(bytes(&buffer, BLOCK) == [5; BLOCK]);
            }
            Part::Completion => {
                for done in done.drain(..) {
                    assert!(done.result.is_ok(), "{done:?}");
                    bytes(&done.buffer.unwrap(), BLOCK);
                }
            }
        }
    }
}

/// Bytes of address space of this process.
fn mapped_bytes() -> u64 {
    let pages = std::fs::read_to_string("/proc/self/statm").unwrap();
    pages.split(' ').next().unwrap().parse::<u64>().unwrap() * 4096
}

#[test]
fn the_memory_of_volumes_that_were_dropped_is_unmapped() {
    let dir = tempfile::tempdir().unwrap();
    let (target, _) = start(dir.path(), "none");
    let mut config = config(&target);
    // Buffers of 256 MiB.
    config.queue_depth = 256;
    config.max_io = ByteSize(1 << 20);
    let mut most = 0;
    for round in 0..20 {
        let mut volume = Options::new(config.clone()).open().unwrap();
        let mut queue = volume.queue().unwrap();
        let buffer = queue.buffer().unwrap();
        queue.submit(Request::read(buffer, 0, BLOCK)).unwrap();
        queue.poll(&mut Vec::new()).unwrap();
        drop(queue);
        volume.close().unwrap();
        if round == 4 {
            most = mapped_bytes() + (1 << 30);
        }
    }
    assert!(mapped_bytes() < most, "15 volumes later: {} of {most}", mapped_bytes());
}
