//! [`StateRecord`]: the record of a volume in the object beside its image, as a [`Keeper`].

use std::fmt;
use std::io;

use rblk_protocol::AccessMode;

use super::image_claim::Wish;
use super::ownership::state_change::KeptText;
use crate::record::{
    KeepError, Keeper, KeeperContent, Revision, VolumeRecord, parse_record, record_text,
};

/// A way to the text of the record, for the owner of the image. Each call may block.
pub trait StateText: fmt::Debug + Send {
    /// The text, and its revision.
    ///
    /// # Errors
    /// The cluster's.
    fn kept(&self) -> io::Result<KeptText>;

    /// Replaces the text: the expected and the next revision. False: it has another revision, or
    /// the image another owner.
    ///
    /// # Errors
    /// The cluster's.
    fn replace_text(&self, text: Vec<u8>, revisions: (u64, u64)) -> io::Result<bool>;
}

/// See the module.
#[derive(Clone, Debug)]
pub struct StateRecord<T> {
    volume: [u8; 16],
    text: T,
    place: String,
}

impl<T: StateText> StateRecord<T> {
    /// The record of a volume. `place`: for people.
    pub fn new(volume: [u8; 16], text: T, place: String) -> Self {
        Self { volume, text, place }
    }

    fn write(&self, record: &VolumeRecord, revisions: (Revision, Revision)) -> io::Result<bool> {
        let (expected, next) = revisions;
        self.text.replace_text(record_text(record, next)?, (expected.0, next.0))
    }
}

impl<T: StateText> Keeper for StateRecord<T> {
    fn read(&self) -> io::Result<KeeperContent> {
        let Some((text, noted)) = self.text.kept()? else { return Ok(KeeperContent::Nothing) };
        Ok(match parse_record(&text) {
            Ok((record, _)) if record.volume() != self.volume => {
                KeeperContent::Garbage("it is the record of another volume".to_owned())
            }
            Ok((record, revision)) if revision == Revision(noted) => {
                KeeperContent::Record(record, revision)
            }
            Ok(_) => KeeperContent::Garbage("its revision is another one than is noted".to_owned()),
            Err(error) => KeeperContent::Garbage(error),
        })
    }

    fn replace(&self, record: &VolumeRecord, expected: Revision) -> Result<Revision, KeepError> {
        let next = expected.next();
        if self.write(record, (expected, next))? {
            return Ok(next);
        }
        match self.text.kept()? {
            Some((_, found)) if found != expected.0 => {
                Err(KeepError::Conflict { found: Revision(found), expected })
            }
            _ => Err(io::Error::new(
                io::ErrorKind::PermissionDenied,
                "another member of the group owns the image",
            )
            .into()),
        }
    }

    fn renounce(&self) -> io::Result<()> {
        let (mut record, revision) = match self.read()? {
            KeeperContent::Record(record, revision) => (record, revision),
            // A volume without a record vouches for nothing anyway.
            KeeperContent::Nothing | KeeperContent::Garbage(_) => return Ok(()),
        };
        record.renounce();
        match self.write(&record, (revision, revision))? {
            true => Ok(()),
            false => Err(io::Error::other("another program wrote it meanwhile")),
        }
    }

    fn place(&self) -> String {
        self.place.clone()
    }
}

/// How the host that comes back had the volume by the record, if it is the holder.
#[must_use]
pub fn holder_in(kept: &KeptText, wish: Wish) -> Option<AccessMode> {
    let Wish::Return(host, generation) = wish else { return None };
    let record = kept.as_ref().and_then(|(text, _)| parse_record(text).ok());
    let holder = record.as_ref().and_then(|(record, _)| record.holder());
    holder.filter(|holder| holder.may_be(host, generation)).map(|holder| holder.mode)
}
