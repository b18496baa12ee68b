//! [`Image`]: an open image, with its lock. The stores of all threads that serve it share it.

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use nix::time::{ClockId, clock_gettime};
use rblk_config::ImageName;
use rblk_operate::target::store_fault::{StoreFault, StoreFaultKind};
use sha2::{Digest, Sha256};

use super::cluster::ClusterPlace;
use super::error::ImageError;
use super::group_member::GroupMember;
use super::image_claim::AskAnswer;
use super::keeper_order::Order;
use super::library::{Handle, Library};
use super::look_order::ProofOrders;
use super::owner_question::{Ask, AskTicket};
use super::ownership::lock_proof::LockProof;
use super::state_keeper::{Asking, ImageRecord};
use crate::store::{Bounds, StoreIdentity};

/// How long an image may leave a request or a question unanswered before it counts as stalled.
const STALL: Duration = Duration::from_secs(5);

/// How long a resize that makes an image longer may take.
const GROWTH_DEADLINE: Duration = Duration::from_secs(60);
/// Time between two looks for the loss of an image during a resize.
const LOSS_STEP: Duration = Duration::from_millis(100);

/// How to open an image.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct ImageOptions {
    /// The image, or a snapshot of it.
    pub name: ImageName,
    /// How to reach its cluster.
    pub cluster: ClusterPlace,
    /// Block size of the volume in bytes.
    pub block_size: u32,
    /// How long to wait for the lock while a live client holds it: a target that just stopped may
    /// still give it back. The cluster itself decides when a dead client has lost it (30 s).
    pub lock_wait: Duration,
    /// The member of a group that is to own it; none: the target is alone.
    pub group: Option<GroupMember>,
}

/// The constants of an open image.
#[derive(Debug)]
pub(super) struct ImageFacts {
    pub library: &'static Library,
    /// The open image of librbd.
    pub handle: Handle,
    pub name: ImageName,
    pub block_size: u32,
    pub identity: String,
    /// How often clients that share no record with this target may have written to it meanwhile.
    pub lineage: u64,
    /// The address by which the cluster names this client as the owner of the lock; none: a
    /// snapshot, which has no lock.
    pub own_address: Option<String>,
    /// Until then, by [`boot_ms`], a former owner may answer the holder of the volume.
    pub holder_alone_until: u64,
}

/// What an image, its keeper and its ops share.
#[derive(Debug)]
pub(super) struct Shared {
    pub facts: ImageFacts,
    // The size in force, and the size of the image as it was seen last.
    size: AtomicU64,
    measured: AtomicU64,
    loss: OnceLock<String>,
    // Ops that began and ended.
    pub begun: AtomicU64,
    pub ended: AtomicU64,
    // Milliseconds since `epoch`, at least 1; 0: none.
    epoch: Instant,
    pub asked_at: AtomicU64,
    pub stuck_since: AtomicU64,
    proof: LockProof,
    listener: Mutex<Option<Listener>>,
}

/// Learns of the loss of an image.
struct Listener(Box<dyn Fn(&str) + Send>);

impl fmt::Debug for Listener {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Listener")
    }
}

// SAFETY: the functions of librbd may be called with one image by several threads. The keeper
// closes the image when no op and no `Image` is left.
unsafe impl Send for ImageFacts {}
// SAFETY: as above.
unsafe impl Sync for ImageFacts {}

impl Shared {
    pub(super) fn new(facts: ImageFacts, size: u64) -> Self {
        Self {
            facts,
            size: AtomicU64::new(size),
            measured: AtomicU64::new(size),
            loss: OnceLock::new(),
            begun: AtomicU64::new(0),
            ended: AtomicU64::new(0),
            epoch: Instant::now(),
            asked_at: AtomicU64::new(0),
            stuck_since: AtomicU64::new(0),
            proof: LockProof::at(boot_ms()),
            listener: Mutex::new(None),
        }
    }

    /// The size in force.
    pub(super) fn size(&self) -> u64 {
        self.size.load(Ordering::Relaxed)
    }

    pub(super) fn set_size(&self, size: u64) {
        self.size.store(size, Ordering::Relaxed);
    }

    /// The image has this size. The image is lost if that is less than the size in force.
    pub(super) fn measured(&self, size: u64) {
        self.measured.store(size, Ordering::Relaxed);
        let served = self.size();
        if size < served {
            self.lose(&format!(
                "the image was made smaller, {size} bytes, under a volume of {served} bytes"
            ));
        }
    }

    /// Milliseconds since the image was opened, at least 1.
    pub(super) fn now_ms(&self) -> u64 {
        u64::try_from(self.epoch.elapsed().as_millis()).unwrap_or(u64::MAX).max(1)
    }

    /// The cluster has fenced this client.
    #[cold]
    pub(super) fn lose_by_fence(&self) {
        let address = self.facts.own_address.as_deref().unwrap_or("its address");
        self.lose(&format!(
            "the cluster has fenced this target (`ceph osd blocklist ls` has {address}): another client broke its \
             lock, or an operator did"
        ));
    }

    /// The image does not belong to this target any more. The first reason counts.
    #[cold]
    pub(super) fn lose(&self, why: &str) {
        if self.loss.set(why.to_owned()).is_err() {
            return;
        }
        tracing::error!(image = %self.facts.name, why, "the image is lost: its volume ends");
        if let Some(Listener(listener)) = &*self.listener() {
            listener(why);
        }
    }

    fn listener(&self) -> std::sync::MutexGuard<'_, Option<Listener>> {
        self.listener.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether the image is lost.
    #[inline]
    pub(super) fn is_lost(&self) -> bool {
        self.loss.get().is_some()
    }

    /// A look that began then, by [`boot_ms`], has found the lock in place.
    pub(super) fn proven(&self, began: u64) {
        self.proof.proven(began);
    }

    /// Whether another client may have the image, since the cluster has been silent for so long, or
    /// has it: the volume answers nothing, neither from the store nor from a cache.
    pub(super) fn is_silent(&self) -> bool {
        self.is_lost() || (self.facts.own_address.is_some() && self.proof.is_stale(boot_ms()))
    }

    /// For how long a former owner may still answer the holder of the volume.
    pub(super) fn for_holder_alone(&self) -> Duration {
        Duration::from_millis(self.facts.holder_alone_until.saturating_sub(boot_ms()))
    }

    fn stalled_for(&self) -> Option<Duration> {
        let (asked, stuck) =
            (self.asked_at.load(Ordering::Relaxed), self.stuck_since.load(Ordering::Relaxed));
        let since = [asked, stuck].into_iter().filter(|ms| *ms > 0).min()?;
        let waited = Duration::from_millis(self.now_ms().saturating_sub(since));
        (waited >= STALL).then_some(waited)
    }
}

/// Milliseconds since the machine started, with the time that it was suspended: the cluster counts
/// that, too.
pub(super) fn boot_ms() -> u64 {
    let now = clock_gettime(ClockId::CLOCK_BOOTTIME).map(Duration::from).unwrap_or_default();
    u64::try_from(now.as_millis()).unwrap_or(u64::MAX)
}

/// An open image. The drop has its keeper close it.
#[derive(Debug)]
pub struct Image {
    shared: Arc<Shared>,
    keeper: Sender<Order>,
    proofs: ProofOrders,
    // Of a member of a group.
    group: Option<(ImageRecord, Asking)>,
}

impl Image {
    pub(super) fn new(
        shared: Arc<Shared>,
        (keeper, proofs): (Sender<Order>, ProofOrders),
        group: Option<(ImageRecord, Asking)>,
    ) -> Self {
        Self { shared, keeper, proofs, group }
    }

    /// Has a function called when the cluster has proven, by an answer to a question after this
    /// call, that this target has the image. It is never called when the image is lost.
    pub(crate) fn prove(&self, on_proof: impl FnOnce() + Send + 'static) {
        self.proofs.ask(Box::new(on_proof));
    }

    /// The record of its volume, which all members of a group have in turn.
    pub(crate) fn record(&self) -> Option<&ImageRecord> {
        self.group.as_ref().map(|(record, _)| record)
    }

    /// Has a function called when another member asks for the image.
    pub(crate) fn on_ask(&self, listener: impl Fn(AskTicket, Ask) + Send + 'static) {
        if let Some((_, asking)) = &self.group {
            asking.listen(Box::new(listener));
        }
    }

    /// For how long no other host than the holder of the record may have the volume, since a former
    /// owner may answer that one.
    pub(crate) fn for_holder_alone(&self) -> Duration {
        self.shared.for_holder_alone()
    }

    /// Answers another member, with the reason of an owner that stays.
    pub(crate) fn answer(&self, ticket: AskTicket, answer: AskAnswer, why: Option<String>) {
        if let Some((_, asking)) = &self.group {
            asking.answer(ticket, answer, why);
        }
    }

    /// Whether another client may have the image by now.
    #[cfg(test)]
    pub(crate) fn is_silent(&self) -> bool {
        self.shared.is_silent()
    }

    pub(super) fn shared(&self) -> &Shared {
        &self.shared
    }

    /// Has a function called when the image is lost, with the reason; at once, if it is.
    pub(crate) fn on_loss(&self, listener: impl Fn(&str) + Send + 'static) {
        let mut place = self.shared.listener();
        match self.shared.loss.get() {
            Some(why) => listener(why),
            None => *place = Some(Listener(Box::new(listener))),
        }
    }

    /// The name, as `pool/image`.
    pub(crate) fn name(&self) -> String {
        self.shared.facts.name.to_string()
    }

    /// Distinguishes the image from every other one, also from a later one of its name, and from
    /// itself before others wrote to it.
    pub(crate) fn identity(&self) -> Option<StoreIdentity> {
        let ImageFacts { identity, lineage, .. } = &self.shared.facts;
        StoreIdentity::parse(&with_lineage(identity, *lineage))
    }

    /// The UUID of a volume on this image: the same at every target.
    pub(crate) fn uuid(&self) -> [u8; 16] {
        uuid_of(&self.shared.facts.identity)
    }

    /// Size in force in bytes, a nonzero multiple of the block size.
    pub(crate) fn size_bytes(&self) -> u64 {
        self.shared.size()
    }

    /// Size of the image in bytes, as it was seen last. The size in force does not change.
    ///
    /// # Errors
    /// It is 0 or not a multiple of the block size.
    pub(crate) fn measured(&self) -> Result<u64, ImageError> {
        let size = self.shared.measured.load(Ordering::Relaxed);
        whole_blocks(&self.shared.facts.name, size, self.shared.facts.block_size)
    }

    /// Whether it is a snapshot, which takes no writes.
    pub(crate) fn read_only(&self) -> bool {
        self.shared.facts.name.snap.is_some()
    }

    /// Sets the size in force, and makes the image as long, if it is another one. Blocks as long as
    /// the cluster does, until the image is lost. But an image that becomes longer is given up
    /// after [`GROWTH_DEADLINE`]: it may become longer later, and nothing uses the bytes.
    ///
    /// # Errors
    /// The cluster refuses or does not answer, the image is lost, or it is a snapshot and too
    /// short.
    pub(crate) fn resize(&self, to: u64) -> Result<(), ImageError> {
        let (reply, answer) = mpsc::sync_channel(0);
        let began = Instant::now();
        let grows = to > self.size_bytes();
        // The keeper lives as long as the image.
        let _ = self.keeper.send(Order::Resize(to, reply));
        loop {
            match answer.recv_timeout(LOSS_STEP) {
                Ok(resized) => return resized,
                Err(RecvTimeoutError::Disconnected) => return self.lost("its keeper has ended"),
                Err(RecvTimeoutError::Timeout) => {}
            }
            if let Some(why) = self.shared.loss.get() {
                return self.lost(why);
            }
            if grows && began.elapsed() > GROWTH_DEADLINE {
                let (image, pool) = (self.name(), self.shared.facts.name.pool.clone());
                let (what, within) = ("make it longer", GROWTH_DEADLINE);
                return Err(ImageError::NoAnswer { image, pool, what, within });
            }
        }
    }

    fn lost<T>(&self, why: &str) -> Result<T, ImageError> {
        Err(ImageError::Lost { image: self.name(), why: why.to_owned() })
    }

    /// Whether this client may fence a dead owner of the lock, as it must after the crash of a
    /// target. Tries it with an address that no client has, for a second. Blocks as long as the
    /// monitors do.
    ///
    /// # Errors
    /// It may not, with the command that lets it.
    pub(crate) fn may_fence(&self) -> Result<(), ImageError> {
        let (reply, answer) = mpsc::sync_channel(1);
        // The keeper lives as long as the image.
        let _ = self.keeper.send(Order::MayFence(reply));
        answer.recv().unwrap_or(Ok(()))
    }

    /// The fault of the image now, if it has one. Does not block.
    pub(crate) fn look(&self) -> Option<StoreFault> {
        let name = self.name();
        let fault =
            |kind, text, advice| Some(StoreFault { kind, text, advice, ends_with_target: false });
        if let Some(why) = self.shared.loss.get() {
            return fault(StoreFaultKind::Lost, format!("its image {name} is lost: {why}"), None);
        }
        if let Some(waited) = self.shared.stalled_for() {
            let text = format!(
                "its image {name} has not answered for {} s, and requests wait",
                waited.as_secs()
            );
            let advice = "look at `ceph -s`: OSDs may be down, or the cluster full".to_owned();
            return fault(StoreFaultKind::Stalled, text, Some(advice));
        }
        None
    }
}

impl Bounds for Image {
    fn read_only(&self) -> bool {
        Image::read_only(self)
    }

    fn size_bytes(&self) -> u64 {
        Image::size_bytes(self)
    }
}

impl Drop for Image {
    fn drop(&mut self) {
        // An error means that the keeper has ended.
        let _ = self.keeper.send(Order::Close);
    }
}

/// A size, if it is a whole number of blocks.
pub(super) fn whole_blocks(
    name: &ImageName,
    size: u64,
    block_size: u32,
) -> Result<u64, ImageError> {
    let image = || name.to_string();
    if size == 0 {
        return Err(ImageError::Empty { image: image() });
    }
    if !size.is_multiple_of(block_size.into()) {
        return Err(ImageError::NotWholeBlocks { image: image(), size, block_size });
    }
    Ok(size)
}

/// The identity of an image: its cluster, pool, namespace, id, and snapshot.
pub(super) fn identity_of(
    fsid: &str,
    pool: i64,
    namespace: &str,
    id: &str,
    snap: Option<u64>,
) -> String {
    let snap = snap.map_or_else(String::new, |snap| format!("@{snap}"));
    format!("rbd:{fsid}/{pool}/{namespace}/{id}{snap}")
}

fn with_lineage(identity: &str, lineage: u64) -> String {
    match lineage {
        0 => identity.to_owned(),
        _ => format!("{identity}~{lineage}"),
    }
}

pub(super) fn uuid_of(identity: &str) -> [u8; 16] {
    let digest = Sha256::digest(identity);
    let mut uuid = [0; 16];
    uuid.copy_from_slice(&digest[..16]);
    uuid
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_identity_follows_from_the_cluster_and_not_from_names() {
        let fsid = "0042dbb1-0a57-4dbe-9d47-c52dd0cfcf5a";
        let head = identity_of(fsid, 2, "", "100d2a4293d0", None);
        assert_eq!(head, "rbd:0042dbb1-0a57-4dbe-9d47-c52dd0cfcf5a/2//100d2a4293d0");
        assert!(StoreIdentity::parse(&head).is_some());
        let others = [
            identity_of(fsid, 3, "", "100d2a4293d0", None),
            identity_of(fsid, 2, "tenant", "100d2a4293d0", None),
            identity_of(fsid, 2, "", "100d2a4293d1", None),
            identity_of(fsid, 2, "", "100d2a4293d0", Some(4)),
        ];
        for other in others {
            assert_ne!(uuid_of(&other), uuid_of(&head), "{other}");
        }
    }
}
