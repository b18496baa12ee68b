//! [`ImageOps`]: the ops of one poll group at its images, from submit to their end.
//!
//! Invariants: an op has at most one request at librbd at a time; its place, its list of parts and
//! the argument of its callback stay where they are until the request has ended, or are leaked.
//!
//! An op of a lost image does not end: its answer could be wrong, and the volume's next owner
//! answers for it. It is held until the poll group has ended the connections of the volume
//! ([`ImageOps::let_go`]); then it fails, and nothing is sent.

use std::ffi::c_int;
use std::ptr;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use nix::errno::Errno;
use rblk_fabric::Region;
use rblk_protocol::width::wide;

use super::cluster::checked;
use super::ended_ops::{CallArgument, Completions, Ended, on_completion};
use super::library::{Handle, Library, ZEROES_THICK};
use super::open_image::{Image, Shared};
use super::place_shares::PlaceShares;
use crate::store::syncs::Door;
use crate::store::uring::{Counters, IoVecs};
use crate::store::{Op, OpDone, OpKind, OpToken, Segment, refusal};
use crate::volume::ids::VolumeIndex;

/// Discard and zeroing advance by this: librbd makes a request for each object of a range at once,
/// and an object has 4 MiB mostly.
const RANGE_STEP: u64 = 256 << 20;

/// A volume on an image.
#[derive(Debug)]
struct ImageVolume {
    image: Arc<Image>,
    // Ops that have not ended.
    ops: usize,
    // The image is lost, and the poll group knows it.
    is_let_go: bool,
    // The poll group knows that the cluster is silent.
    is_silent: bool,
}

/// The place of an op.
#[derive(Debug)]
struct Place {
    op: Op,
    // Bytes finished, and those of the request at librbd.
    progress: u64,
    step: u64,
    // For a read or write. Unchanged while librbd has a request, which may point into it.
    memory: IoVecs,
    // Points to a `CallArgument` of this place; null until the first op.
    argument: *mut CallArgument,
}

// SAFETY: the argument is a box of its own, which only librbd's callback reads.
unsafe impl Send for Place {}

/// See the module.
#[derive(Debug)]
pub(in crate::store) struct ImageOps {
    region: Arc<Region>,
    volumes: Vec<Option<ImageVolume>>,
    capacity: u32,
    // Made for the first volume.
    places: Box<[Place]>,
    free: Vec<u32>,
    shares: PlaceShares,
    // Requests at librbd.
    under_way: u32,
    // Ops of lost images.
    held: Vec<u32>,
    completions: Arc<Completions>,
}

impl ImageOps {
    /// Room for `capacity` ops on `region`. `door` wakes the poll group.
    pub(in crate::store) fn new(region: Arc<Region>, capacity: u32, door: Door) -> Self {
        Self {
            region,
            volumes: Vec::new(),
            capacity,
            places: Box::default(),
            free: Vec::new(),
            shares: PlaceShares::of(wide(capacity)),
            under_way: 0,
            held: Vec::new(),
            completions: Arc::new(Completions::new(capacity, door)),
        }
    }

    /// The image of a volume.
    pub(in crate::store) fn image(&self, volume: VolumeIndex) -> Option<&Arc<Image>> {
        let place = self.volumes.get(usize::from(volume.0))?;
        place.as_ref().map(|volume| &volume.image)
    }

    /// Ops of a volume that have not ended.
    pub(in crate::store) fn ops_of(&self, volume: VolumeIndex) -> usize {
        let place = self.volumes.get(usize::from(volume.0)).and_then(Option::as_ref);
        place.map_or(0, |volume| volume.ops)
    }

    /// Adds a volume, whose index is free.
    pub(in crate::store) fn add(&mut self, volume: VolumeIndex, image: Arc<Image>) {
        if self.places.is_empty() {
            self.places = (0..self.capacity).map(|_| Place::free()).collect();
            self.free = (0..self.capacity).rev().collect();
            self.held = Vec::with_capacity(wide(self.capacity));
        }
        let at = usize::from(volume.0);
        if self.volumes.len() <= at {
            self.volumes.resize_with(at + 1, || None);
        }
        self.volumes[at] = Some(ImageVolume { image, ops: 0, is_let_go: false, is_silent: false });
        self.share_anew();
    }

    /// Removes a volume without ops.
    pub(in crate::store) fn remove(&mut self, volume: VolumeIndex) {
        if let Some(place) = self.volumes.get_mut(usize::from(volume.0)) {
            *place = None;
        }
        self.share_anew();
    }

    fn share_anew(&mut self) {
        self.shares.share_anew(self.volumes.iter().flatten().map(|volume| volume.ops));
    }

    /// Whether there is or was a volume.
    #[inline]
    pub(in crate::store) fn has_any(&self) -> bool {
        !self.volumes.is_empty()
    }

    /// The next volume whose cluster has become silent (true), or speaks again, since the last
    /// call.
    pub(in crate::store) fn next_silence(&mut self) -> Option<(VolumeIndex, bool)> {
        self.volumes.iter_mut().zip(0..).find_map(|(volume, index)| {
            let volume = volume.as_mut()?;
            let is_silent = volume.image.shared().is_silent();
            let was_silent = std::mem::replace(&mut volume.is_silent, is_silent);
            (was_silent != is_silent).then_some((VolumeIndex(index), is_silent))
        })
    }

    /// Number of ops that fit.
    pub(in crate::store) fn capacity(&self) -> u32 {
        self.capacity
    }

    /// Ops that have not ended.
    #[inline]
    pub(in crate::store) fn in_flight(&self) -> usize {
        self.places.len() - self.free.len()
    }

    /// Whether librbd may end an op.
    #[inline]
    pub(in crate::store) fn is_busy(&self) -> bool {
        self.under_way > 0
    }

    /// The poll group is about to sleep. False: it may not, since an op has ended.
    pub(in crate::store) fn fall_asleep(&self) -> bool {
        !self.is_busy() || self.completions.fall_asleep()
    }

    /// The poll group does not sleep any more.
    pub(in crate::store) fn wake_up(&self) {
        self.completions.wake_up();
    }

    /// Takes an op, or gives it back when there is no place for its image. Out of line, so that the
    /// path of files stays as short as it was.
    #[inline(never)]
    pub(in crate::store) fn submit(
        &mut self,
        op: Op,
        memory: &[Segment],
        (done, counters): (&mut Vec<OpDone>, &mut Counters),
    ) -> Result<(), Op> {
        let at = usize::from(op.volume.0);
        let volume = self.volumes.get_mut(at).and_then(Option::as_mut);
        let image = volume.as_ref().map(|volume| volume.image.as_ref());
        let refused = refusal(image, self.region.len(), &op.kind, memory);
        let (Some(volume), None) = (volume, refused) else {
            let result = refused.unwrap_or(Err(Errno::ENXIO));
            counters.count(&op.kind, result);
            done.push(OpDone { token: op.token, result });
            return Ok(());
        };
        let has_room = self.shares.has_room(volume.ops);
        let Some(index) = self.free.pop_if(|_| has_room) else { return Err(op) };
        self.shares.began(volume.ops);
        volume.ops += 1;
        volume.image.shared().begun.fetch_add(1, Ordering::Relaxed);
        let place = &mut self.places[wide(index)];
        (place.op, place.progress, place.step) = (op, 0, 0);
        let result = match place.memory.set(&self.region, memory) {
            true => self.send(index),
            false => Err(Errno::EINVAL),
        };
        if let Err(errno) = result {
            self.ended(index, -i64::from(errno as i32), (done, counters));
        }
        Ok(())
    }

    /// Ends the ops that librbd has ended.
    #[inline(never)]
    pub(in crate::store) fn collect(&mut self, done: &mut Vec<OpDone>, counters: &mut Counters) {
        while let Some(Ended { place, result }) = self.completions.pop() {
            self.under_way -= 1;
            self.ended(place, result, (done, counters));
        }
    }

    /// The connections of a volume have ended, as its image is lost: its ops fail.
    pub(in crate::store) fn let_go(
        &mut self,
        volume: VolumeIndex,
        (done, counters): (&mut Vec<OpDone>, &mut Counters),
    ) {
        let Some(Some(state)) = self.volumes.get_mut(usize::from(volume.0)) else { return };
        state.is_let_go = true;
        let mut at = 0;
        while let Some(&index) = self.held.get(at) {
            if self.places[wide(index)].op.volume == volume {
                self.held.swap_remove(at);
                self.finish(index, Err(Errno::ESHUTDOWN), (done, counters));
            } else {
                at += 1;
            }
        }
    }

    /// Leaks the memory that librbd may still use, and the images with ops.
    pub(in crate::store) fn leak(&mut self) {
        std::mem::forget(std::mem::take(&mut self.places));
        self.free.clear();
        std::mem::forget(Arc::clone(&self.region));
        for volume in self.volumes.iter().flatten().filter(|volume| volume.ops > 0) {
            std::mem::forget(Arc::clone(&volume.image));
        }
    }

    fn shared(&self, volume: VolumeIndex) -> Option<&Shared> {
        self.image(volume).map(|image| image.shared())
    }

    /// Sends the next request of an op, unless its image is lost.
    fn send(&mut self, index: u32) -> Result<(), Errno> {
        let completions = &self.completions;
        let place = &mut self.places[wide(index)];
        let volume = self.volumes.get(usize::from(place.op.volume.0)).and_then(Option::as_ref);
        let shared = volume.map(|volume| volume.image.shared()).ok_or(Errno::ENXIO)?;
        if shared.is_lost() {
            return Err(Errno::ESHUTDOWN);
        }
        let library = shared.facts.library;
        if place.argument.is_null() {
            let completions = Arc::clone(completions);
            let argument = CallArgument { library, completions, place: index };
            place.argument = Box::into_raw(Box::new(argument));
        }
        let mut completion = ptr::null_mut();
        // SAFETY: the argument lives as long as the place, which outlives the request.
        checked(unsafe {
            let argument = place.argument.cast();
            (library.rbd_aio_create_completion)(argument, on_completion, &raw mut completion)
        })?;
        let sent = place.request(library, shared.facts.handle, completion);
        match sent {
            Ok(()) => self.under_way += 1,
            // SAFETY: librbd did not take the request, so it does not complete it.
            Err(_) => unsafe { (library.rbd_aio_release)(completion) },
        }
        sent
    }

    /// A request of an op has ended.
    fn ended(
        &mut self,
        index: u32,
        result: i64,
        (done, counters): (&mut Vec<OpDone>, &mut Counters),
    ) {
        let place = &self.places[wide(index)];
        let op = place.op;
        let Some(shared) = self.shared(op.volume) else {
            debug_assert!(false, "an op without its volume");
            return self.finish(index, Err(Errno::ENXIO), (done, counters));
        };
        let errno = (result < 0).then(|| Errno::from_raw(narrow_errno(result)));
        match errno {
            Some(Errno::ESHUTDOWN) => shared.lose_by_fence(),
            // Whatever the op: librbd cannot get the lock back that it needs for it.
            Some(Errno::EROFS) if shared.facts.own_address.is_some() => {
                shared.lose("its exclusive lock is gone: librbd refuses requests");
            }
            _ => {}
        }
        if shared.is_lost() {
            return match self.is_let_go(op.volume) {
                true => self.finish(index, Err(Errno::ESHUTDOWN), (done, counters)),
                false => self.held.push(index),
            };
        }
        if let Some(errno) = errno {
            return self.finish(index, Err(errno), (done, counters));
        }
        let place = &mut self.places[wide(index)];
        place.progress += place.step;
        if place.progress < op.kind.range().1 {
            if let Err(errno) = self.send(index) {
                self.ended(index, -i64::from(errno as i32), (done, counters));
            }
            return;
        }
        let is_short = matches!(op.kind, OpKind::Read { len, .. } if result != i64::from(len));
        let value = match op.kind {
            OpKind::Read { len, .. } | OpKind::Write { len, .. } => len,
            OpKind::Flush | OpKind::Discard { .. } | OpKind::WriteZeroes { .. } => 0,
        };
        let result = if is_short { Err(Errno::EIO) } else { Ok(value) };
        self.finish(index, result, (done, counters));
    }

    fn is_let_go(&self, volume: VolumeIndex) -> bool {
        let place = self.volumes.get(usize::from(volume.0)).and_then(Option::as_ref);
        place.is_none_or(|volume| volume.is_let_go)
    }

    fn finish(
        &mut self,
        index: u32,
        result: Result<u32, Errno>,
        (done, counters): (&mut Vec<OpDone>, &mut Counters),
    ) {
        let place = &mut self.places[wide(index)];
        place.memory.clear();
        let op = place.op;
        self.free.push(index);
        if let Some(Some(volume)) = self.volumes.get_mut(usize::from(op.volume.0)) {
            self.shares.ended(volume.ops);
            volume.ops -= 1;
            volume.image.shared().ended.fetch_add(1, Ordering::Relaxed);
        }
        counters.count(&op.kind, result);
        done.push(OpDone { token: op.token, result });
    }
}

impl Place {
    fn free() -> Self {
        Self {
            op: Op { token: OpToken(0), volume: VolumeIndex(0), kind: OpKind::Flush },
            progress: 0,
            step: 0,
            memory: IoVecs::default(),
            argument: ptr::null_mut(),
        }
    }

    /// Hands the next request to librbd.
    fn request(
        &mut self,
        library: &Library,
        image: Handle,
        completion: Handle,
    ) -> Result<(), Errno> {
        let (offset, len) = self.op.kind.range();
        let (from, left) = (offset + self.progress, len - self.progress);
        let step = left.min(RANGE_STEP);
        let vecs = || {
            let (list, parts) = self.memory.as_kernel_list().ok_or(Errno::EINVAL)?;
            Ok::<_, Errno>((list, c_int::try_from(parts).map_err(|_| Errno::EINVAL)?))
        };
        let (step, sent) = match self.op.kind {
            OpKind::Read { .. } => {
                let (list, parts) = vecs()?;
                // SAFETY: the list is of this place, which keeps it until the request has ended;
                // its parts are inside the region, which the store holds as long.
                let sent = unsafe { (library.rbd_aio_readv)(image, list, parts, from, completion) };
                (left, sent)
            }
            OpKind::Write { .. } => {
                let (list, parts) = vecs()?;
                // SAFETY: as above.
                let sent =
                    unsafe { (library.rbd_aio_writev)(image, list, parts, from, completion) };
                (left, sent)
            }
            OpKind::Flush => {
                // SAFETY: the image is open as long as an op has it.
                (0, unsafe { (library.rbd_aio_flush)(image, completion) })
            }
            OpKind::Discard { .. } => {
                // SAFETY: as above.
                (step, unsafe { (library.rbd_aio_discard)(image, from, step, completion) })
            }
            OpKind::WriteZeroes { may_unmap, .. } => {
                let flags = if may_unmap { 0 } else { ZEROES_THICK };
                // SAFETY: as above.
                let sent = unsafe {
                    (library.rbd_aio_write_zeroes)(image, from, wide(step), completion, flags, 0)
                };
                (step, sent)
            }
        };
        self.step = step;
        checked(sent).map(drop)
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        if !self.argument.is_null() {
            // SAFETY: made by `Box::into_raw`; no request of this place is under way, else the
            // places are leaked.
            drop(unsafe { Box::from_raw(self.argument) });
        }
    }
}

fn narrow_errno(result: i64) -> i32 {
    i32::try_from(result.wrapping_neg()).unwrap_or(Errno::EIO as i32)
}
