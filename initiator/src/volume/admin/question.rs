//! The question after an event: the new state of the open volume. A LIST of this volume, with its
//! answer awaited beside the events, so that nothing waits for it.
//!
//! An event is in the clear and proves nothing; LIST is sealed wherever commands are.

use std::time::{Duration, Instant};

use rblk_protocol::auth::COMMAND_SEAL_BYTES;
use rblk_protocol::width::narrow;
use rblk_protocol::{
    AsyncEvent, CommandCapsule, DropRequest, Opcode, ResponseCapsule, Status, VolumeEntry,
    VolumeHandle, VolumeListHeader,
};

use super::{AdminChannel, CALL_TAG, DropAnswer, Reply};
use crate::volume::error::SessionError;

/// Time for the answer. The target's data thread answers KEEP_ALIVEs meanwhile.
const ANSWER_TIME: Duration = Duration::from_secs(30);

/// News from the target.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum TargetNews {
    /// An event; `None` for one of a later version.
    Event(Option<AsyncEvent>),
    /// The new state of the volume.
    Volume(VolumeEntry),
    /// The session has lost the volume.
    Gone,
    /// The answer to a DROP of these epochs.
    Dropped(DropRequest, DropAnswer),
}

/// A question under way.
#[derive(Debug)]
pub(super) struct Question {
    command: CommandCapsule,
    deadline: Instant,
}

/// The only entry of a list.
fn entry_of(payload: &[u8]) -> Result<VolumeEntry, SessionError> {
    const BROKEN: SessionError = SessionError::Protocol("a list of one volume that has none");
    let (head, rest) = payload.split_at_checked(VolumeListHeader::BYTES).ok_or(BROKEN)?;
    let header = VolumeListHeader::from_wire(head).map_err(SessionError::Protocol)?;
    let entry = rest.get(..VolumeEntry::BYTES).filter(|_| header.entries == 1).ok_or(BROKEN)?;
    VolumeEntry::from_wire(entry).map_err(SessionError::Protocol)
}

impl AdminChannel {
    /// Asks for a volume, if an event has come and no answer is under way.
    pub(super) fn ask_if_news(
        &mut self,
        volume: VolumeHandle,
        now: Instant,
    ) -> Result<(), SessionError> {
        if !self.events.volumes_changed || self.question.is_some() {
            return Ok(());
        }
        self.events.volumes_changed = false;
        let mut command = self.command(Opcode::ListVolumes, CALL_TAG);
        command.volume = volume;
        command.buffer = Some(self.qp.reply_buffer(CALL_TAG));
        let mut body = Vec::new();
        if let Some(seal) = &mut self.seal {
            command.in_capsule_bytes = narrow(COMMAND_SEAL_BYTES);
            body = seal.seal_command(command.sequence, &command.to_wire(), &[])?;
        }
        self.qp.send(&mut command, &body)?;
        self.question = Some(Question { command, deadline: now + ANSWER_TIME });
        Ok(())
    }

    /// Takes a response, which must be the answer to the question.
    pub(super) fn heard(&mut self, response: &ResponseCapsule) -> Result<TargetNews, SessionError> {
        const UNASKED: SessionError =
            SessionError::Protocol("an answer to a command that was not sent");
        let Some(Question { command, .. }) = self.question.take() else { return Err(UNASKED) };
        if response.tag != CALL_TAG || !response.answers(command.sequence) {
            return Err(UNASKED);
        }
        let ResponseCapsule { status, value, .. } = *response;
        let mut reply = Reply { status, value, payload: self.qp.reply(CALL_TAG) };
        if self.seal.is_some() {
            let mut sealed = self.open(&command, &reply)?;
            let payload = std::mem::take(&mut *sealed.payload);
            reply = Reply { status: sealed.status, value: sealed.value, payload };
        }
        match reply.status {
            Status::Ok => entry_of(&reply.payload).map(TargetNews::Volume),
            Status::VolumeGone | Status::NoSuchVolume => Ok(TargetNews::Gone),
            // A new session learns it from OPEN.
            status => Err(SessionError::Status {
                what: "asking how the volume changed".to_owned(),
                status,
                text: String::new(),
            }),
        }
    }

    /// The deadline of an awaited answer.
    ///
    /// # Errors
    /// The answer is late.
    pub(super) fn answer_due(&self, now: Instant) -> Result<Option<Instant>, SessionError> {
        match &self.question {
            Some(question) if now >= question.deadline => {
                Err(SessionError::TimedOut { what: Opcode::ListVolumes })
            }
            question => Ok(question.as_ref().map(|question| question.deadline)),
        }
    }

    /// Waits for the answer, if one is awaited: a command needs its place. The answer is dropped,
    /// and the question is asked again later.
    pub(super) async fn hear_out(&mut self, deadline: Instant) -> Result<(), SessionError> {
        let mut armed = false;
        while self.question.is_some() {
            let now = Instant::now();
            if let Some(response) = self.next_response(now)? {
                self.heard(&response)?;
                self.events.volumes_changed = true;
            } else if now >= deadline {
                return Err(SessionError::TimedOut { what: Opcode::ListVolumes });
            } else {
                // After arming, poll once more before the sleep.
                if armed {
                    self.qp.sleep_until(deadline).await?;
                } else {
                    self.qp.arm()?;
                }
                armed = !armed;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use rblk_protocol::{BlockCount, BlockSize, Name, VolumeFlags};

    use super::*;

    #[test]
    fn the_list_of_one_volume_has_one_entry() {
        let entry = VolumeEntry {
            name: Name::new("v").unwrap(),
            flags: VolumeFlags::default(),
            block_size: BlockSize::new(4096).unwrap(),
            blocks: BlockCount(7),
            uuid: [1; 16],
        };
        let list = |entries| {
            let header = VolumeListHeader { entries, total: 1 };
            [header.to_wire().as_slice(), entry.to_wire().as_slice(), &[0; 9]].concat()
        };
        assert_eq!(entry_of(&list(1)).unwrap(), entry);
        for bad in [&list(0)[..], &list(2), &list(1)[..20], &list(1)[..4], &[]] {
            assert!(matches!(entry_of(bad), Err(SessionError::Protocol(_))), "{bad:?}");
        }
        let mut broken = list(1);
        broken[VolumeListHeader::BYTES..].fill(0xff);
        assert!(entry_of(&broken).is_err());
    }
}
