//! The queue of `rblk-client` for the tasks of a thread, with real targets: data, back-pressure,
//! futures that are dropped at any point, targets that are killed meanwhile, and ends.

use std::cell::Cell;
use std::future::poll_fn;
use std::path::Path;
use std::pin::pin;
use std::rc::Rc;
use std::task::Poll;
use std::time::{Duration, Instant};

use rblk_client::tokio::{Driver, Failed, Handle, Why};
use rblk_client::{Config, Options, Queue, Reason, Request, Volume};
use rblk_config::ByteSize;
use rblk_rig::seed::Random;
use rblk_tests::bed::pattern;
use rblk_tests::program::{DEADLINE, Target, wait_for};
use tokio::runtime::Runtime;
use tokio::task::{JoinHandle, JoinSet, LocalSet, spawn_local, yield_now};

#[path = "../../../initiator/client/examples/tasks.rs"]
#[allow(dead_code)] // its `main`
mod example;

const BLOCK: usize = 4096;
const MIB: usize = 1 << 20;
const DEPTH: usize = 8;
const SPARE: u16 = 8;

/// A target with a volume `v` in a file, and the arguments to start it again.
fn start(dir: &Path) -> (Target, Vec<String>) {
    let (path, file) = (dir.join("v.img"), dir.join("target.toml"));
    std::fs::write(&path, vec![0; 4 * MIB]).unwrap();
    let path = path.display();
    let text = format!("[[volume]]\nname = 'v'\nstore = 'file'\npath = '{path}'\ncache = 'none'\n");
    std::fs::write(&file, text).unwrap();
    let args = vec!["--config".to_owned(), file.display().to_string()];
    (Target::start(dir, &words(&args)), args)
}

fn words(args: &[String]) -> Vec<&str> {
    args.iter().map(String::as_str).collect()
}

/// Starts a target again, from a task. The start uses its own runtime, so it needs another thread.
fn start_again(target: &mut Target, dir: &Path, args: &[String]) {
    std::thread::scope(|scope| {
        scope.spawn(|| target.start_again(dir, &words(args)));
    });
}

fn open(target: &Target) -> (Volume, Queue) {
    let mut config = Config::new(target.address.to_string(), "v");
    config.queue_depth = u16::try_from(DEPTH).unwrap();
    config.max_io = ByteSize(64 << 10);
    config.reconnect_delay = rblk_config::Duration::from_millis(20);
    let mut volume = Options::new(config).spare_buffers(SPARE).open().unwrap();
    let queue = volume.queue().unwrap();
    (volume, queue)
}

fn runtime() -> Runtime {
    tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap()
}

/// A handle, and the number of polls of its driver.
struct Driven {
    handle: Handle,
    driver: JoinHandle<std::io::Result<Queue>>,
    polls: Rc<Cell<u64>>,
}

fn drive(queue: Queue) -> Driven {
    let (handle, driver) = Driver::new(queue).unwrap();
    let polls = Rc::new(Cell::new(0));
    let counted = Rc::clone(&polls);
    let driver = spawn_local(async move {
        let mut run = pin!(driver.run());
        poll_fn(|context| {
            counted.set(counted.get() + 1);
            run.as_mut().poll(context)
        })
        .await
    });
    Driven { handle, driver, polls }
}

/// Lets the tasks work until the condition is true.
#[track_caller]
fn until(what: &'static str, mut look: impl FnMut() -> bool) -> impl Future<Output = ()> {
    let deadline = Instant::now() + DEADLINE;
    async move {
        while !look() {
            assert!(Instant::now() < deadline, "{what} did not happen");
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    }
}

async fn write(queue: &Handle, block: usize, data: &[u8]) -> Result<(), Failed> {
    let mut buffer = queue.buffer().await?;
    buffer.write(0, data);
    queue.write(buffer, (block * BLOCK) as u64, data.len()).await.map(drop)
}

async fn read(queue: &Handle, block: usize, len: usize) -> Result<Vec<u8>, Failed> {
    let mut buffer = queue.buffer().await?;
    buffer.write(0, &vec![0xee; len]);
    let buffer = queue.read(buffer, (block * BLOCK) as u64, len).await?;
    let mut bytes = vec![0; len];
    buffer.read(0, &mut bytes);
    Ok(bytes)
}

#[test]
fn the_example_of_the_module_runs() {
    let dir = tempfile::tempdir().unwrap();
    let (target, _) = start(dir.path());
    assert_eq!(example::tasks(&target.address.to_string(), "v", 200).unwrap(), 199 * 200 / 2);
    wait_for("the end of the session", || target.status().sessions.is_empty().then_some(()));
    let lines = include_str!("../../../initiator/client/examples/tasks.rs").lines().count();
    assert!(lines <= 60, "{lines} lines are no short example");
}

/// One of many tasks, with its own blocks: random requests, compared with a model.
async fn exercise(queue: Handle, first: usize, blocks: usize, seed: u64) {
    let mut random = Random::new(seed);
    let mut model = vec![0u8; blocks * BLOCK];
    for round in 0..60 {
        let at = random.index(blocks);
        let len = (1 + random.index((blocks - at).min(4))) * BLOCK;
        let range = at * BLOCK..at * BLOCK + len;
        let offset = ((first + at) * BLOCK) as u64;
        match random.below(6) {
            0 => queue.flush().await.unwrap(),
            1 => {
                queue.write_zeroes(offset, len as u64).await.unwrap();
                model[range].fill(0);
            }
            2 | 3 => {
                let data = pattern(seed << 20 | round, len);
                write(&queue, first + at, &data).await.unwrap();
                model[range].copy_from_slice(&data);
            }
            _ => {
                let found = read(&queue, first + at, len).await.unwrap();
                assert!(found == model[range], "seed {seed}, round {round}");
            }
        }
    }
    for at in 0..blocks {
        let found = read(&queue, first + at, BLOCK).await.unwrap();
        assert!(found == model[at * BLOCK..][..BLOCK], "seed {seed}, block {at}");
    }
}

#[test]
fn many_tasks_of_one_queue_read_what_they_wrote() {
    let dir = tempfile::tempdir().unwrap();
    let (target, _) = start(dir.path());
    let (volume, queue) = open(&target);
    let most_waiting = Rc::new(Cell::new(0));
    let watched = Rc::clone(&most_waiting);
    LocalSet::new().block_on(&runtime(), async move {
        let Driven { handle, driver, .. } = drive(queue);
        assert_eq!((handle.depth(), handle.free_buffers()), (DEPTH, DEPTH + usize::from(SPARE)));
        let watcher = handle.clone();
        let watch = spawn_local(async move {
            loop {
                assert!(watcher.under_way() <= DEPTH);
                watched.set(watched.get().max(watcher.waiting()));
                yield_now().await;
            }
        });
        let mut tasks = JoinSet::new();
        for task in 0..32 {
            tasks.spawn_local(exercise(handle.clone(), task * 32, 32, task as u64));
        }
        while let Some(ended) = tasks.join_next().await {
            ended.unwrap();
        }
        watch.abort();
        let counts = handle.counts().unwrap();
        assert_eq!((counts.errors, counts.copied_bytes), (0, 0), "{counts:?}");
        assert_eq!(handle.free_buffers(), DEPTH + usize::from(SPARE));
        // A refused request comes back with its buffer.
        let buffer = handle.buffer().await.unwrap();
        let failed = handle.read(buffer, 1, BLOCK).await.unwrap_err();
        assert!(matches!(failed.why, Why::Refused(Reason::NotWholeBlocks { .. })), "{failed}");
        assert!(failed.buffer.is_some());
        // The driver ends with the last handle.
        let _ = watch.await;
        drop((handle, failed));
        driver.await.unwrap().unwrap();
    });
    assert!(most_waiting.get() > 0, "the queue was never full");
    volume.close().unwrap();
}

/// The target of a round, as the tasks see it.
#[derive(Default)]
struct Away {
    /// The target is dead, and not started again.
    now: Cell<bool>,
    /// Requests that were given up in that time.
    given_up: Cell<u64>,
}

/// When a task gives a future up.
#[derive(Clone, Copy)]
enum Patience {
    Polls(u64),
    /// Once the target is away.
    WithTarget,
    Endless,
}

impl Patience {
    fn draw(random: &mut Random) -> Self {
        match random.below(10) {
            0..4 => Self::Polls(random.below(5)),
            4..7 => Self::WithTarget,
            _ => Self::Endless,
        }
    }

    /// Polls a future while the patience lasts. `None`: the future is dropped then.
    async fn wait<T>(self, away: &Away, future: impl Future<Output = T>) -> Option<T> {
        let mut future = pin!(future);
        let mut polls = 0;
        loop {
            match self {
                Self::Polls(most) if polls >= most => return None,
                Self::WithTarget if away.now.get() => return None,
                _ => polls += 1,
            }
            let polled = poll_fn(|context| Poll::Ready(future.as_mut().poll(context))).await;
            if let Poll::Ready(ended) = polled {
                return Some(ended);
            }
            yield_now().await;
        }
    }
}

/// The possible contents of each block: one value, or several after writes that were given up.
type Model = Vec<Vec<Vec<u8>>>;

/// One of many tasks, with its own blocks, that gives some of its requests up.
async fn give_some_up(
    queue: Handle,
    first: usize,
    mut model: Model,
    seed: u64,
    away: &Away,
) -> Model {
    let mut random = Random::new(seed);
    for round in 0..40 {
        let at = random.index(model.len());
        let patience = Patience::draw(&mut random);
        let Some(buffer) = patience.wait(away, queue.buffer()).await else { continue };
        let mut buffer = buffer.unwrap();
        let data = pattern(seed << 20 | round, BLOCK);
        buffer.write(0, &data);
        // Only the task touches its buffer: no late answer, no other request.
        for _ in 0..random.below(4) {
            yield_now().await;
        }
        let mut found = vec![0; BLOCK];
        buffer.read(0, &mut found);
        assert!(found == data, "seed {seed}, round {round}: somebody wrote to a buffer of ours");
        let offset = ((first + at) * BLOCK) as u64;
        // A block is not written again until its contents are known.
        if random.chance(500) && model[at].len() == 1 {
            model[at].push(data);
            if let Some(written) = patience.wait(away, queue.write(buffer, offset, BLOCK)).await {
                written.unwrap();
                model[at].remove(0);
                continue;
            }
        } else if let Some(read) = patience.wait(away, queue.read(buffer, offset, BLOCK)).await {
            read.unwrap().read(0, &mut found);
            assert!(model[at].contains(&found), "seed {seed}, round {round}, block {at}");
            continue;
        }
        if away.now.get() {
            away.given_up.set(away.given_up.get() + 1);
        }
    }
    model
}

/// Three rounds of tasks that give requests up. In the second one the target is killed, and started
/// again once the queue is full of requests.
async fn rounds_with_a_kill(
    queue: Queue,
    target: &mut Target,
    dir: &Path,
    args: &[String],
    seed: u64,
) -> u64 {
    const TASKS: usize = 24;
    const BLOCKS: usize = 8;
    let Driven { handle, driver, .. } = drive(queue);
    let mut models: Vec<Model> = vec![vec![vec![vec![0; BLOCK]]; BLOCKS]; TASKS];
    let away = Rc::new(Away::default());
    for round in 0..3 {
        let mut tasks = JoinSet::new();
        for (task, model) in models.drain(..).enumerate() {
            let seed = seed * 1000 + round * 100 + task as u64;
            let (queue, away) = (handle.clone(), away.clone());
            tasks.spawn_local(async move {
                (task, give_some_up(queue, task * BLOCKS, model, seed, &away).await)
            });
        }
        if round == 1 {
            let before = handle.counts().unwrap().answered;
            until("a request", || handle.counts().unwrap().answered > before + 5).await;
            target.kill();
            away.now.set(true);
            // Each task gets the poll before which it gives its request up.
            for _ in 0..100 {
                yield_now().await;
            }
            until("a full queue", || handle.under_way() == DEPTH).await;
            away.now.set(false);
            start_again(target, dir, args);
        }
        let mut ended = Vec::new();
        while let Some(task) = tasks.join_next().await {
            ended.push(task.unwrap());
        }
        ended.sort_by_key(|(task, _)| *task);
        handle.settled().await;
        assert_eq!((handle.given_up(), handle.under_way()), (0, 0));
        assert_eq!(handle.free_buffers(), DEPTH + usize::from(SPARE), "buffers are missing");
        for (task, mut model) in ended {
            for (at, holds) in model.iter_mut().enumerate() {
                let found = read(&handle, task * BLOCKS + at, BLOCK).await.unwrap();
                assert!(holds.contains(&found), "seed {seed}, round {round}, {task}, {at}");
                *holds = vec![found];
            }
            models.push(model);
        }
    }
    assert!(handle.counts().unwrap().paths_lost > 0);
    drop(handle);
    assert_eq!(driver.await.unwrap().unwrap().under_way(), 0);
    away.given_up.get()
}

#[test]
fn futures_may_be_dropped_at_any_point_while_the_target_is_killed() {
    let dir = tempfile::tempdir().unwrap();
    let (mut target, args) = start(dir.path());
    let mut given_up = 0;
    for seed in rblk_tests::storm::seeds(6) {
        std::fs::write(dir.path().join("v.img"), vec![0; 4 * MIB]).unwrap();
        let (volume, queue) = open(&target);
        let run = rounds_with_a_kill(queue, &mut target, dir.path(), &args, seed);
        let while_away = LocalSet::new().block_on(&runtime(), run);
        println!("seed {seed}: {while_away} requests were given up while the target was away");
        given_up += while_away;
        volume.close().unwrap();
    }
    assert!(given_up > 0, "no request was given up while the target was away");
}

#[test]
fn a_handle_that_is_closed_ends_what_is_under_way_and_nothing_else() {
    let dir = tempfile::tempdir().unwrap();
    let (mut target, args) = start(dir.path());
    let (volume, queue) = open(&target);
    let mut queue = LocalSet::new().block_on(&runtime(), async {
        let Driven { handle, driver, .. } = drive(queue);
        target.kill();
        let tasks: Vec<_> = (0..DEPTH + 4)
            .map(|block| {
                let queue = handle.clone();
                spawn_local(async move { write(&queue, block, &[7; BLOCK]).await })
            })
            .collect();
        until("requests", || (handle.under_way(), handle.waiting()) == (DEPTH, 4)).await;
        handle.close();
        let (under_way, waiting) = {
            let mut tasks = tasks;
            let waiting = tasks.split_off(DEPTH);
            (tasks, waiting)
        };
        for task in waiting {
            let failed = task.await.unwrap().unwrap_err();
            assert_eq!((failed.why, failed.buffer.is_some()), (Why::Closed, true));
        }
        assert_eq!(handle.flush().await.unwrap_err().why, Why::Closed);
        assert_eq!(handle.buffer().await.unwrap_err().why, Why::Closed);
        assert!(!driver.is_finished());
        start_again(&mut target, dir.path(), &args);
        for task in under_way {
            task.await.unwrap().unwrap();
        }
        let queue = driver.await.unwrap().unwrap();
        assert_eq!(handle.flush().await.unwrap_err().why, Why::Ended);
        queue
    });
    // The queue works as before.
    let buffer = queue.buffer().unwrap();
    queue.submit(Request::read(buffer, 0, BLOCK)).unwrap();
    let mut done = Vec::new();
    while queue.wait(&mut done, Duration::from_secs(1)).unwrap() == 0 {}
    assert_eq!(done[0].result, Ok(BLOCK));
    drop((done, queue));
    volume.close().unwrap();
}

#[test]
fn a_dropped_driver_fails_every_request() {
    let dir = tempfile::tempdir().unwrap();
    let (mut target, args) = start(dir.path());
    let (volume, queue) = open(&target);
    LocalSet::new().block_on(&runtime(), async {
        let Driven { handle, driver, .. } = drive(queue);
        let mut kept = handle.buffer().await.unwrap();
        target.kill();
        let task = |block: usize| {
            let queue = handle.clone();
            spawn_local(async move { write(&queue, block, &[7; BLOCK]).await })
        };
        let tasks: Vec<_> = (0..DEPTH + 4).map(task).collect();
        until("requests", || handle.waiting() == 4).await;
        let given_up = task(100);
        until("one more", || handle.waiting() == 5).await;
        given_up.abort();
        until("its end", || handle.waiting() == 4).await;
        let settled = handle.clone();
        tasks[0].abort();
        until("a request that is given up", || handle.given_up() == 1).await;
        let settled = spawn_local(async move { settled.settled().await });
        yield_now().await;
        driver.abort();
        assert!(driver.await.unwrap_err().is_cancelled());
        for (number, task) in tasks.into_iter().enumerate().skip(1) {
            let failed = task.await.unwrap().unwrap_err();
            // Only a request that was never sent comes back with its buffer.
            assert_eq!((failed.why, failed.buffer.is_some()), (Why::Ended, number >= DEPTH));
        }
        settled.await.unwrap();
        assert_eq!(handle.buffer().await.unwrap_err().why, Why::Ended);
        assert_eq!(handle.counts(), None);
        // Its memory still exists.
        kept.write(0, &[5; BLOCK]);
    });
    target.start_again(dir.path(), &words(&args));
    volume.close().unwrap();
    wait_for("the end of the session", || target.status().sessions.is_empty().then_some(()));
}

#[test]
fn a_driver_with_nothing_to_do_sleeps() {
    let dir = tempfile::tempdir().unwrap();
    let (mut target, args) = start(dir.path());
    let (volume, queue) = open(&target);
    LocalSet::new().block_on(&runtime(), async {
        let Driven { handle, driver, polls } = drive(queue);
        write(&handle, 0, &[7; BLOCK]).await.unwrap();
        let idle = async |what: &str| {
            let before = polls.get();
            tokio::time::sleep(Duration::from_millis(500)).await;
            let polls = polls.get() - before;
            // A loop without sleep would make a hundred thousand polls.
            assert!(polls < 1000, "{polls} polls, {what}");
        };
        idle("with nothing under way").await;
        target.kill();
        let queue = handle.clone();
        let waits = spawn_local(async move { write(&queue, 0, &[8; BLOCK]).await });
        until("a request", || handle.under_way() == 1).await;
        idle("with a request that waits for the target").await;
        start_again(&mut target, dir.path(), &args);
        waits.await.unwrap().unwrap();
        handle.close();
        driver.await.unwrap().unwrap();
    });
    volume.close().unwrap();
}
