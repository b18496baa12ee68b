//! [`OpenImage`]: an image that a member has open, its lock and what it knows of it, and
//! [`ImageText`], the record of the volume beside it.

use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use rblk_target::store::rbd::header_lock::LockOwner;
use rblk_target::store::rbd::lock_look::LockLooks;
use rblk_target::store::rbd::ownership::lock_proof::LockProof;
use rblk_target::store::rbd::ownership::owner_note::OwnerNote;
use rblk_target::store::rbd::ownership::state_change::KeptText;
use rblk_target::store::rbd::ownership::state_tenure::StateTenure;
use rblk_target::store::rbd::state_record::StateText;

use super::cluster::{MemberPlace, SharedCluster};

/// See the module.
#[derive(Debug)]
pub struct OpenImage {
    /// Its number.
    pub number: u64,
    /// The client.
    pub client: String,
    /// The note of this member.
    pub note: OwnerNote,
    /// Its lock, with this client as the owner.
    pub owner: LockOwner,
    /// The looks at its lock.
    pub looks: LockLooks,
    /// A look is under way since then, and found this owner so far.
    pub looking: Option<u64>,
    /// The last proof of its lock.
    pub proof: LockProof,
    /// It belongs to somebody else.
    pub is_lost: bool,
    /// Control is told of a loss.
    pub is_loss_heard: bool,
    /// Questions of other members reach control.
    pub listens: bool,
    /// Until then, only the holder of the record may have the volume.
    pub for_holder_until: u64,
    /// Its ops under way.
    pub ops: u64,
    /// Nothing uses it any more: it closes when its ops have ended.
    pub closes: bool,
    /// The note beside it is as it is to be left.
    pub is_noted: bool,
    /// The record beside it.
    pub text: ImageText,
}

impl OpenImage {
    /// An image that this client owns, and whose lock was proven then.
    #[must_use]
    pub fn new(
        number: u64,
        (cluster, client): (&SharedCluster, &str),
        (note, owner): (OwnerNote, LockOwner),
        proven_at: u64,
    ) -> Self {
        let text = ImageText {
            cluster: Arc::clone(cluster),
            client: client.to_owned(),
            tenure: Arc::new(Mutex::new(StateTenure::new(note.clone()))),
            is_closed: Arc::default(),
            late: Arc::default(),
        };
        Self {
            number,
            client: client.to_owned(),
            note,
            looks: LockLooks::since(owner.clone()),
            owner,
            looking: None,
            proof: LockProof::at(proven_at),
            is_lost: false,
            is_loss_heard: false,
            listens: false,
            for_holder_until: 0,
            ops: 0,
            closes: false,
            is_noted: false,
            text,
        }
    }

    /// Whether another client may have it by now: nothing is answered.
    #[must_use]
    pub fn is_silent(&self, now: u64) -> bool {
        self.is_lost || self.proof.is_stale(now)
    }
}

/// Records whose writes were given up: their revisions and texts.
type LateTexts = Vec<((u64, u64), Vec<u8>)>;

/// The record of the volume beside an image. Copies are of one.
#[derive(Clone, Debug)]
pub struct ImageText {
    cluster: SharedCluster,
    client: String,
    tenure: Arc<Mutex<StateTenure>>,
    is_closed: Arc<AtomicBool>,
    // The cluster does not answer in time: what was to be written meanwhile.
    late: Arc<Mutex<Option<LateTexts>>>,
}

impl ImageText {
    fn place(&self) -> MemberPlace<'_> {
        MemberPlace { cluster: &self.cluster, client: &self.client }
    }

    fn tenure(&self) -> std::sync::MutexGuard<'_, StateTenure> {
        self.tenure.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Gives the image back. Without this, the next owner fences this client.
    pub fn give_back(&self) {
        // An error means that the client is fenced.
        let _ = self.tenure().give_back(&self.place());
    }

    /// The image is closed.
    pub fn close(&self) {
        self.is_closed.store(true, Ordering::Relaxed);
    }

    /// The cluster does not answer in time from now on, or (false) does again.
    pub fn set_late(&self, is_late: bool) {
        let mut late = self.late.lock().unwrap_or_else(PoisonError::into_inner);
        match is_late {
            true => {
                late.get_or_insert_with(Vec::new);
            }
            false => {
                for (revisions, text) in late.take().into_iter().flatten() {
                    let mut tenure = self.tenure();
                    if tenure.replace(&self.place(), revisions, &text) == Ok(true) {
                        tenure.not_told(revisions);
                    }
                }
            }
        }
    }

    fn check(&self) -> io::Result<()> {
        match self.is_closed.load(Ordering::Relaxed) {
            true => Err(io::Error::new(io::ErrorKind::NotConnected, "the image is closed")),
            false => Ok(()),
        }
    }
}

fn late_error() -> io::Error {
    io::Error::new(io::ErrorKind::TimedOut, "the cluster did not answer within 10 s")
}

impl StateText for ImageText {
    fn kept(&self) -> io::Result<KeptText> {
        self.check()?;
        if self.late.lock().unwrap_or_else(PoisonError::into_inner).is_some() {
            return Err(late_error());
        }
        self.place().record().map_err(io::Error::from)
    }

    fn replace_text(&self, text: Vec<u8>, revisions: (u64, u64)) -> io::Result<bool> {
        self.check()?;
        if let Some(late) = &mut *self.late.lock().unwrap_or_else(PoisonError::into_inner) {
            late.push((revisions, text));
            return Err(late_error());
        }
        self.tenure().replace(&self.place(), revisions, &text).map_err(io::Error::from)
    }
}
