//! [`Kernel`]: a model of the block layer and the ublk driver, which gives requests to a server by
//! tags.
//!
//! The driver keeps a request until the server has answered it. When the server dies, the driver
//! gives its requests to the next server, in another order and under other tags, with the same
//! data: recovery with re-issue.

use std::ops::Range;

use rblk_initiator::engine::io::IoOp;
use rblk_protocol::Tag;
use rblk_rig::seed::Random;

use crate::oracle::{Begin, ChangeId};

/// The oracle's view of a request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Expect {
    /// A read.
    Read(Begin),
    /// A write, discard or write of zeroes.
    Change(ChangeId),
    /// A flush.
    Flush(Begin),
}

/// A request that is not answered.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Request {
    /// The operation.
    pub op: IoOp,
    /// The range in bytes.
    pub range: Range<usize>,
    /// Durable when answered.
    pub fua: bool,
    /// The oracle's view of it.
    pub expect: Expect,
    /// When a server first got this flush.
    pub given: Option<Begin>,
    /// The queue and the tag that the server has it under.
    pub place: Option<(usize, Tag)>,
}

/// The requests of one device.
#[derive(Debug)]
pub struct Kernel {
    requests: Vec<Request>,
    // By queue.
    idle: Vec<Vec<Tag>>,
    depth: u16,
    // Contents of idle buffers, by queue and tag. These bytes must not change.
    guards: Vec<Vec<Option<Vec<u8>>>>,
}

impl Kernel {
    /// A device without requests.
    #[must_use]
    pub fn new(queues: usize, depth: u16) -> Self {
        let mut kernel = Self { requests: Vec::new(), idle: Vec::new(), depth, guards: Vec::new() };
        kernel.begin_service(queues);
        kernel
    }

    fn begin_service(&mut self, queues: usize) {
        self.idle = vec![(0..self.depth).rev().map(Tag).collect(); queues];
        self.guards = vec![vec![None; usize::from(self.depth)]; queues];
    }

    /// The server died.
    pub fn crash(&mut self, random: &mut Random) {
        self.begin_service(self.idle.len());
        // The dead server's requests come first: the driver keeps tags for them.
        self.requests.sort_by_key(|request| request.place.is_none());
        let had = self.requests.iter().filter(|request| request.place.is_some()).count();
        for last in (1..had).rev() {
            self.requests.swap(last, random.index(last + 1));
        }
        for request in &mut self.requests {
            request.place = None;
        }
    }

    /// Requests that are not answered.
    #[must_use]
    pub fn requests(&self) -> &[Request] {
        &self.requests
    }

    /// Takes a request.
    pub fn begin(&mut self, request: Request) {
        self.requests.push(request);
    }

    /// The next request for the server, with its new place, if there is a tag for it.
    pub fn next(&mut self, random: &mut Random) -> Option<&mut Request> {
        let at = self.requests.iter().position(|request| request.place.is_none())?;
        let first = random.index(self.idle.len());
        let queues = (0..self.idle.len()).map(|more| (first + more) % self.idle.len());
        let queue = queues.into_iter().find(|queue| !self.idle[*queue].is_empty())?;
        let tag = self.idle[queue].pop()?;
        self.requests[at].place = Some((queue, tag));
        Some(&mut self.requests[at])
    }

    /// Ends a request that the server answered.
    ///
    /// # Panics
    /// The server has no such request.
    pub fn end(&mut self, queue: usize, tag: Tag) -> Request {
        let place = Some((queue, tag));
        let at = self.requests.iter().position(|request| request.place == place);
        let at = at.unwrap_or_else(|| panic!("no request has tag {} of queue {queue}", tag.0));
        self.idle[queue].push(tag);
        self.requests.swap_remove(at)
    }

    /// Replaces the remembered contents of an idle buffer, and returns the old ones.
    pub fn guard(&mut self, queue: usize, tag: Tag, bytes: Option<Vec<u8>>) -> Option<Vec<u8>> {
        std::mem::replace(&mut self.guards[queue][tag.index()], bytes)
    }

    /// All guarded buffers.
    pub fn guards(&self) -> impl Iterator<Item = (usize, Tag, &[u8])> {
        self.guards.iter().enumerate().flat_map(|(queue, tags)| {
            (0u16..).zip(tags).filter_map(move |(tag, bytes)| {
                bytes.as_deref().map(|bytes| (queue, Tag(tag), bytes))
            })
        })
    }
}
