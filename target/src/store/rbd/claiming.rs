//! The acts of a [`Claim`], carried out at a cluster. All of them are made by the client that will
//! do the I/O: it has the map that its own fence made.

use std::ffi::{CStr, c_int};
use std::ptr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use nix::errno::Errno;

use super::cluster::{Cluster, checked, text};
use super::fencing::fenced_client::{FENCE_SECONDS, warn_of_short_fences};
use super::group_member::GroupMember;
use super::header_lock::{HeaderLock, LockOwner};
use super::image_claim::{Act, Claim, Event, FormerHosts, Outcome};
use super::image_watchers::ImageWatchers;
use super::library::{Handle, LOCK_EXCLUSIVE, Library};
use super::open_image::boot_ms;
use super::owner_question::{Ask, ask};
use super::ownership::fence_call::FenceCall;
use super::ownership::lock_proof::former_answers_until;
use super::ownership::owner_note::OwnerNote;
use super::ownership::state_change::StatePlace;
use super::state_object::StateObject;
use super::state_record::holder_in;

/// Time between two looks at an owner that hands over, or is dead.
const PAUSE: Duration = Duration::from_millis(100);

/// The places of a claim.
pub(super) struct ClaimPlaces<'p> {
    pub library: &'static Library,
    pub cluster: &'p Cluster,
    pub image: Handle,
    pub lock: &'p HeaderLock,
    pub object: &'p StateObject,
}

/// An image that this member owns.
pub(super) struct Claimed {
    pub note: OwnerNote,
    pub owner: LockOwner,
    /// A moment at which this client had the lock, by [`boot_ms`].
    pub proven_at: u64,
    /// The hosts that a former owner may still answer from its cache, and until when, by
    /// [`boot_ms`].
    pub former: (FormerHosts, u64),
}

impl Claimed {
    /// The moment until which only the holder of the record may have the volume, by [`boot_ms`].
    pub(super) fn holder_alone_until(&self) -> u64 {
        match self.former {
            (FormerHosts::Holder, until) => until,
            (FormerHosts::Nobody | FormerHosts::All, _) => 0,
        }
    }
}

/// Why an image is not claimed, and the reason that its owner gave.
pub(super) type NotClaimed = (Outcome, Option<String>);

/// Claims an image. Blocks as long as the cluster does, and as an owner that hands over. Nobody
/// waits for an abandoned claim: it disturbs no owner any more.
pub(super) fn claim(
    places: &ClaimPlaces<'_>,
    member: &GroupMember,
    is_abandoned: &AtomicBool,
) -> Result<Result<Claimed, NotClaimed>, Errno> {
    let GroupMember { name, addresses, wish, may_break, more } = member.clone();
    let own = OwnerNote { member: name, addresses, ..OwnerNote::default() };
    let mut claim = Claim::new(own, wish, may_break);
    let mut act = claim.next(Event::Begin);
    let mut seen = OwnerNote::default();
    let (mut locked, mut why, mut fenced) = (None, None, Vec::new());
    loop {
        tracing::debug!(object = places.object.name(), ?act, "a claim");
        if locked.is_none() && is_abandoned.load(Ordering::Relaxed) && claim.may_stop_before(&act) {
            tracing::warn!(object = places.object.name(), ?act, "a claim was given up");
            return Err(Errno::ECANCELED);
        }
        more.take().into_iter().for_each(|wish| claim.raise(wish));
        let event = match act {
            Act::Look => {
                seen = places.object.owner()?;
                Event::Seen(seen.clone(), places.lock.owner()?.map(|owner| owner.address))
            }
            Act::ReadHolder => places.read_holder(&claim)?,
            Act::Ask => {
                let question = Ask::of(&member.name, claim.wish());
                let said = ask(places.object, seen.epoch, &question)?;
                why = said.as_ref().and_then(|said| said.why.clone());
                Event::Answered(said.map(|said| said.answer))
            }
            Act::FindWatch(client) => Event::Watched(places.is_watched(&client)?),
            Act::Lock => {
                locked = places.take_lock()?;
                Event::Locked(locked.as_ref().map(|(owner, _)| owner.address.clone()))
            }
            Act::Fence(client) => {
                tracing::warn!(client, owner = seen.member, "fences the client of a former owner");
                places.fence(Some(&client))?;
                fenced.push(client);
                Event::Fenced
            }
            Act::NewestMap => {
                places.fence(None)?;
                Event::HasMap
            }
            Act::Break(client) => Event::Broken(places.break_lock(&client)?),
            Act::Swap(epoch, note) => Event::Swapped(places.object.swap_owner(epoch, &note)?),
            Act::Unlock => {
                // SAFETY: an open image.
                checked(unsafe { (places.library.rbd_lock_release)(places.image) })?;
                Event::Unlocked
            }
            Act::Pause => {
                thread::sleep(PAUSE);
                Event::Paused
            }
            Act::End(outcome) => {
                warn_of_short_fences(places.cluster, &fenced);
                return Ok(match (outcome, locked) {
                    (Outcome::Owned(note), Some((owner, proven_at))) => {
                        let former = (claim.former(), former_answers_until(proven_at));
                        Ok(Claimed { note, owner, proven_at, former })
                    }
                    (outcome, _) => Err((outcome, why)),
                });
            }
        };
        act = claim.next(event);
    }
}

/// Waits until no former owner answers a host from its cache any more. Returns whether this client
/// still has the lock then, and when.
///
/// A former owner answers for [`PROVEN`](super::ownership::lock_proof::PROVEN) after the last look
/// that proved its lock, whether or not the cluster reaches it. That look was before this client
/// had the lock.
pub(super) fn wait_for_former(lock: &HeaderLock, claimed: &mut Claimed) -> Result<bool, Errno> {
    let left = Duration::from_millis(claimed.former.1.saturating_sub(boot_ms()));
    tracing::info!(
        client = claimed.note.client,
        ?left,
        "waits until a former owner has noticed that it may not answer"
    );
    thread::sleep(left);
    let began = boot_ms();
    let has_it = lock.owner()?.is_some_and(|owner| owner.address == claimed.owner.address);
    claimed.proven_at = began;
    Ok(has_it)
}

impl ClaimPlaces<'_> {
    fn read_holder(&self, claim: &Claim) -> Result<Event, Errno> {
        match (self.object.record(), claim.despite_failure()) {
            (Ok(kept), _) => Ok(Event::Holder(holder_in(&kept, claim.wish()))),
            (Err(errno), Some(event)) => {
                tracing::warn!(object = self.object.name(), %errno, "cannot read a record again");
                Ok(event)
            }
            (Err(errno), None) => Err(errno),
        }
    }

    /// Fences a client for ever, or none, and waits for the map.
    fn fence(&self, client: Option<&str>) -> Result<(), Errno> {
        for call in FenceCall::all(client.is_some()) {
            match (call, client) {
                (FenceCall::Refuse, Some(client)) => self.cluster.fence(client, FENCE_SECONDS)?,
                (FenceCall::Refuse, None) => {}
                (FenceCall::NewestMap, _) => self.cluster.wait_for_map()?,
            }
        }
        Ok(())
    }

    /// Whether a client may watch the image.
    fn is_watched(&self, client: &str) -> Result<bool, Errno> {
        ImageWatchers::of(self.library, self.image).map(|watchers| watchers.may_have(client))
    }

    /// Takes the lock, if nobody who lives has it. Returns this client as its owner, and a moment
    /// at which it had the lock.
    fn take_lock(&self) -> Result<Option<(LockOwner, u64)>, Errno> {
        // SAFETY: an open image.
        match checked(unsafe { (self.library.rbd_lock_acquire)(self.image, LOCK_EXCLUSIVE) }) {
            Ok(_) => {}
            Err(Errno::EROFS | Errno::EBUSY | Errno::EAGAIN) => return Ok(None),
            Err(errno) => return Err(errno),
        }
        let began = boot_ms();
        let owner = self.lock.owner()?.ok_or(Errno::ENOLCK)?;
        Ok(Some((owner, began)))
    }

    /// Breaks the lock, if that client has it.
    fn break_lock(&self, client: &str) -> Result<bool, Errno> {
        let (mut mode, mut owners, mut count): (c_int, _, usize) = (0, [ptr::null_mut(); 4], 4);
        // SAFETY: an open image; the call writes the mode, the number of owners and their texts,
        // for which the list has room.
        let listed = checked(unsafe {
            (self.library.rbd_lock_get_owners)(
                self.image,
                &raw mut mode,
                owners.as_mut_ptr(),
                &raw mut count,
            )
        });
        match listed {
            Ok(_) => {}
            Err(Errno::ENOENT) => return Ok(false),
            Err(errno) => return Err(errno),
        }
        let has_it = |owner: &&*mut std::ffi::c_char| {
            // SAFETY: a text that the call made, which ends with a zero.
            let owner = unsafe { CStr::from_ptr(**owner) }.to_string_lossy();
            owner.strip_prefix("v1:").unwrap_or(&owner) == client
        };
        let found = owners[..count.min(owners.len())].iter().find(has_it).map(|owner| {
            // SAFETY: as above.
            unsafe { CStr::from_ptr(*owner) }.to_string_lossy().into_owned()
        });
        // SAFETY: the texts that the call made, which nothing uses any more.
        unsafe { (self.library.rbd_lock_get_owners_cleanup)(owners.as_mut_ptr(), count) };
        let Some(owner) = found else { return Ok(false) };
        let owner = text(&owner);
        // SAFETY: an open image; the text lives as long as the call.
        let broken = checked(unsafe {
            (self.library.rbd_lock_break)(self.image, LOCK_EXCLUSIVE, owner.as_ptr())
        });
        match broken {
            Ok(_) => Ok(true),
            Err(Errno::ENOENT | Errno::EBUSY) => Ok(false),
            Err(errno) => Err(errno),
        }
    }
}
