//! [`DropCall`]: a DROP whose answer is awaited beside the events and the other commands. A store
//! that hangs holds it for half a minute, and the target tells news meanwhile.

use std::time::{Duration, Instant};

use rblk_protocol::auth::COMMAND_SEAL_BYTES;
use rblk_protocol::width::narrow;
use rblk_protocol::{CommandCapsule, DropRequest, Opcode, ResponseCapsule, Status};

use super::{AdminChannel, DROP_TAG, Reply};
use crate::volume::error::SessionError;

/// Time for the answer. The target answers after 30 s at the latest.
const ANSWER_TIME: Duration = Duration::from_secs(35);

/// The answer of the target to a DROP.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum DropAnswer {
    /// Nothing of the epochs is left.
    Over,
    /// They end, and it takes longer than a DROP may wait. The target can be asked again at once.
    Later,
    /// The target did not take the DROP. The session goes on.
    Refused(Status),
}

/// A DROP under way.
#[derive(Debug)]
pub(super) struct DropCall {
    command: CommandCapsule,
    epochs: DropRequest,
    deadline: Instant,
    response: Option<ResponseCapsule>,
}

impl DropCall {
    /// Takes a response, if it is the awaited one.
    pub(super) fn answered(&mut self, response: &ResponseCapsule) -> bool {
        let is_it = self.response.is_none() && response.answers(self.command.sequence);
        if is_it {
            self.response = Some(*response);
        }
        is_it
    }
}

impl AdminChannel {
    /// Asks the target to end these epochs of the session. The answer is
    /// [`TargetNews::Dropped`](super::TargetNews::Dropped). One DROP is under way at a time.
    ///
    /// # Errors
    /// The connection died, or a DROP is under way.
    pub(crate) fn drop_epochs(&mut self, epochs: DropRequest) -> Result<(), SessionError> {
        if self.dropping.is_some() {
            return Err(SessionError::Protocol("two DROPs at a time"));
        }
        let mut command = self.command(Opcode::Drop, DROP_TAG);
        let mut body = epochs.to_wire().to_vec();
        if let Some(seal) = &mut self.seal {
            command.buffer = Some(self.qp.reply_buffer(DROP_TAG));
            command.in_capsule_bytes = narrow(body.len() + COMMAND_SEAL_BYTES);
            body = seal.seal_command(command.sequence, &command.to_wire(), &body)?;
        }
        self.qp.send(&mut command, &body)?;
        let deadline = Instant::now() + ANSWER_TIME;
        self.dropping = Some(DropCall { command, epochs, deadline, response: None });
        Ok(())
    }

    /// The answer to the DROP, if it has arrived.
    ///
    /// # Errors
    /// The session is over, or the answer is not sealed as it must be.
    pub(super) fn drop_answer(
        &mut self,
    ) -> Result<Option<(DropRequest, DropAnswer)>, SessionError> {
        let arrived = self.dropping.take_if(|call| call.response.is_some());
        let Some(DropCall { command, epochs, response: Some(response), .. }) = arrived else {
            return Ok(None);
        };
        let status = match self.seal.is_some() {
            true => {
                let ResponseCapsule { status, value, .. } = response;
                let reply = Reply { status, value, payload: self.qp.reply(DROP_TAG) };
                self.open(&command, &reply)?.status
            }
            false => response.status,
        };
        let answer = match status {
            Status::Ok => DropAnswer::Over,
            Status::TimedOut => DropAnswer::Later,
            // The session, or its life by this way, is over.
            Status::Fenced | Status::NoSuchSession | Status::NotAllowed | Status::NotReady => {
                let what = "dropping epochs".to_owned();
                return Err(SessionError::Status { what, status, text: String::new() });
            }
            status => DropAnswer::Refused(status),
        };
        Ok(Some((epochs, answer)))
    }

    /// The deadline of the answer to a DROP.
    ///
    /// # Errors
    /// The answer is late.
    pub(super) fn drop_due(&self, now: Instant) -> Result<Option<Instant>, SessionError> {
        match &self.dropping {
            Some(call) if now >= call.deadline => {
                Err(SessionError::TimedOut { what: Opcode::Drop })
            }
            call => Ok(call.as_ref().map(|call| call.deadline)),
        }
    }
}
