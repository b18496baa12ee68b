//! The acts of a [`Claim`], carried out at a cluster. All of them are made by the client that will
//! do the I/O: it has the map that its own fence made.

use std::ffi::{CStr, c_int};
use std::ptr;
use std::thread;
use std::time::Duration;

use nix::errno::Errno;

use super::cluster::{Cluster, checked, text};
use super::group_member::GroupMember;
use super::header_lock::{HeaderLock, LockOwner};
use super::image_claim::{Act, Claim, Event, Outcome, Wish};
use super::library::{Handle, LOCK_EXCLUSIVE, Library};
use super::open_image::boot_ms;
use super::owner_question::{Ask, ask};
use super::state_object::{OwnerNote, StateObject};
use crate::record::parse_record;

/// How long a former owner stays fenced: longer than any machine is suspended.
pub(super) const FENCE_SECONDS: u32 = 10 * 365 * 24 * 60 * 60;
/// Time between two looks at an owner that hands over.
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
}

/// Claims an image. Blocks as long as the cluster does, and as an owner that hands over.
pub(super) fn claim(
    places: &ClaimPlaces<'_>,
    member: &GroupMember,
) -> Result<Result<Claimed, Outcome>, Errno> {
    let GroupMember { name, addresses, wish, may_break } = member.clone();
    let own = OwnerNote { member: name, addresses, ..OwnerNote::default() };
    let mut claim = Claim::new(own, wish, may_break);
    let mut act = claim.next(Event::Begin);
    let mut seen = OwnerNote::default();
    let mut locked = None;
    loop {
        tracing::debug!(object = places.object.name(), ?act, "a claim");
        let event = match act {
            Act::Look => {
                seen = places.object.owner()?;
                Event::Seen(seen.clone(), places.lock.owner()?.map(|owner| owner.address))
            }
            Act::ReadHolder => Event::Holder(places.is_holder(wish)?),
            Act::Ask => {
                let question = Ask::of(&member.name, claim.wish());
                Event::Answered(ask(places.object, seen.epoch, &question)?)
            }
            Act::Lock => {
                locked = places.take_lock()?;
                Event::Locked(locked.as_ref().map(|(owner, _)| owner.address.clone()))
            }
            Act::Fence(client) => {
                tracing::warn!(client, owner = seen.member, "fences the client of a former owner");
                places.cluster.fence(&client, FENCE_SECONDS)?;
                Event::Fenced
            }
            Act::NewestMap => {
                places.cluster.wait_for_map()?;
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
                return Ok(match (outcome, locked) {
                    (Outcome::Owned(note), Some((owner, proven_at))) => {
                        Ok(Claimed { note, owner, proven_at })
                    }
                    (outcome, _) => Err(outcome),
                });
            }
        };
        act = claim.next(event);
    }
}

impl ClaimPlaces<'_> {
    /// Whether the host that comes back is the holder by the record, or one of several.
    fn is_holder(&self, wish: Wish) -> Result<bool, Errno> {
        let Wish::Return(host, generation) = wish else { return Ok(false) };
        let record = self.object.record()?.and_then(|(text, _)| parse_record(&text).ok());
        let holder = record.as_ref().and_then(|(record, _)| record.holder());
        Ok(holder.is_some_and(|holder| holder.may_be(host, generation)))
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
