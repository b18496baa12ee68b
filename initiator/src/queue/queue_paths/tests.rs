use std::os::fd::BorrowedFd;
use std::sync::Arc;

use rblk_fabric::soft::network::Network;
use rblk_fabric::{PageKind, Region};
use rblk_protocol::QueueDepth;

use super::*;
use crate::engine::QueueStats;
use crate::engine::path::sample;
use crate::engine::ways::choice::ChoicePolicy;

/// A sleeper that refuses so many watches.
#[derive(Default)]
struct Scarce {
    refusals: u32,
    errno: i32,
    watched: Vec<DescriptorToken>,
}

impl DescriptorWatch for Scarce {
    fn watch(&mut self, _: BorrowedFd<'_>, token: DescriptorToken) -> io::Result<()> {
        if self.refusals > 0 {
            self.refusals -= 1;
            return Err(io::Error::from_raw_os_error(self.errno));
        }
        self.watched.push(token);
        Ok(())
    }

    fn unwatch(&mut self, token: DescriptorToken) {
        self.watched.retain(|watched| *watched != token);
    }

    fn submit_removals(&mut self) -> io::Result<()> {
        Ok(())
    }
}

struct Bed {
    engine: Engine,
    paths: Paths,
    _ends: Vec<Box<dyn std::any::Any>>,
    now: Instant,
}

/// A queue with a next path.
fn bed() -> Bed {
    let (network, now) = (Network::new(1), Instant::now());
    let depth = QueueDepth::new(sample::DEPTH).unwrap();
    let bytes = usize::from(sample::DEPTH) * sample::DATA_MAX;
    let buffers = Region::allocate(bytes, PageKind::Normal).unwrap();
    let engine = Engine::new(depth, sample::DATA_MAX, Arc::new(QueueStats::default()));
    let (outbox, news) = mpsc::unbounded_channel();
    let mut paths = Paths::new(0, outbox);
    let (path, wire) = sample::path(&network, &buffers, true);
    paths.set_next(Box::new(path));
    Bed { engine, paths, _ends: vec![Box::new((network, wire, news))], now }
}

#[test]
fn a_path_is_used_though_the_system_has_no_descriptor_to_watch_it() {
    let mut bed = bed();
    let mut watch = Scarce { refusals: 3, errno: libc::EMFILE, ..Scarce::default() };
    assert!(!bed.paths.change(&mut bed.engine, &mut watch, bed.now).unwrap().is_empty());
    assert!(bed.engine.has_deadline(), "its self-test is under way");
    assert!(bed.paths.is_unwatched() && watch.watched.is_empty());
    // The watch is tried again now and then, not with every turn.
    for _ in 0..100 {
        assert!(bed.paths.change(&mut bed.engine, &mut watch, bed.now).unwrap().is_empty());
    }
    assert_eq!(watch.refusals, 2);
    for later in 1..=3 {
        let now = bed.now + later * WATCH_AGAIN;
        assert!(bed.paths.is_unwatched(), "{later}");
        bed.paths.change(&mut bed.engine, &mut watch, now).unwrap();
    }
    assert!(!bed.paths.is_unwatched() && !watch.watched.is_empty());
    assert!(watch.watched.iter().all(|token| bed.paths.way_of(*token).is_some()));
    // The watches end with their path.
    bed.engine.disconnect();
    assert!(bed.paths.send_off(&mut bed.engine, &mut watch).unwrap());
    assert!(watch.watched.is_empty());
}

#[test]
fn a_path_that_ends_unwatched_is_not_watched_any_more() {
    let mut bed = bed();
    let mut watch = Scarce { refusals: 1, errno: libc::ENFILE, ..Scarce::default() };
    bed.paths.change(&mut bed.engine, &mut watch, bed.now).unwrap();
    bed.engine.disconnect();
    bed.paths.send_off(&mut bed.engine, &mut watch).unwrap();
    assert!(!bed.paths.is_unwatched());
    bed.paths.change(&mut bed.engine, &mut watch, bed.now + WATCH_AGAIN).unwrap();
    assert!(watch.watched.is_empty());
}

#[test]
fn a_permanent_refusal_is_an_error() {
    let mut bed = bed();
    let mut watch = Scarce { refusals: 1, errno: libc::EBADF, ..Scarce::default() };
    assert!(bed.paths.change(&mut bed.engine, &mut watch, bed.now).is_err());
}

/// A path that does not fit the queue: it never carries a request, and its QPs live for a while.
#[test]
fn the_place_of_a_path_that_cannot_be_used_is_not_free_before_that_path_is_over() {
    let mut bed = bed();
    bed.paths.drop_next();
    let depth = QueueDepth::new(sample::DEPTH / 2).unwrap();
    bed.engine = Engine::new(depth, sample::DATA_MAX, Arc::new(QueueStats::default()));
    bed.engine.allow_ways(0, ChoicePolicy::Least);
    let way = WayIndex::new(1).unwrap();
    let (network, mut watch) = (Network::new(2), Scarce::default());
    let bytes = usize::from(sample::DEPTH) * sample::DATA_MAX;
    let buffers = Region::allocate(bytes, PageKind::Normal).unwrap();
    let (path, _wire) = sample::path(&network, &buffers, true);
    bed.paths.set_join(Box::new(Path { way, ..path }));
    assert!(bed.engine.may_join(way));
    bed.paths.change(&mut bed.engine, &mut watch, bed.now).unwrap();
    assert!(bed.engine.live_ways().is_empty() && !bed.engine.may_join(way));
    bed.engine.way_destroyed(way);
    assert!(!bed.engine.may_join(way), "the target may have connections of its epoch");
    bed.engine.way_dropped(way);
    assert!(bed.engine.may_join(way));
}
