//! [`Ask`]: the question of a member to the owner of an image whether it hands over, by a notice of
//! the cluster to the object that the owner watches.
//!
//! Members need no way to each other for this: whoever serves an image reaches the cluster. An
//! owner that does not reach it cannot answer, and could not serve.

use std::ffi::{c_char, c_int, c_void};
use std::ptr;
use std::thread;
use std::time::{Duration, Instant};

use nix::errno::Errno;
use rblk_protocol::{AccessMode, HostId};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::cluster::checked;
use super::image_claim::{AskAnswer, Wish};
use super::state_object::StateObject;
use crate::record::holders::HolderRecord;

/// How long the owner may take to answer.
const ANSWER_DEADLINE: Duration = Duration::from_secs(4);
/// How long an owner without a watch is asked again, and the pause in between.
const NOBODY_WATCHES: Duration = Duration::from_secs(1);
const ASK_PAUSE: Duration = Duration::from_millis(250);
/// Longest question and answer, in bytes.
const TEXT_MAX: usize = 4096;

/// See the module.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Ask {
    /// The member that asks.
    pub member: String,
    /// The holder that has come to it, as 32 hexadecimal digits; none: another host.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub holder: Option<String>,
    /// The generation that the holder names.
    #[serde(default)]
    pub generation: u64,
    /// A host takes the volume over, or an operator who is at the member that asks.
    #[serde(default)]
    pub take_over: bool,
    /// The owner has told the member to ask, by an order of this number.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub order: Option<u64>,
}

impl Ask {
    /// The question of a member with this wish.
    #[must_use]
    pub fn of(member: &str, wish: Wish) -> Self {
        let (holder, generation) = match wish {
            Wish::Return(host, generation) => (Some(host.to_string()), generation.0),
            Wish::Idle | Wish::Fresh | Wish::Order(_) | Wish::TakeOver => (None, 0),
        };
        let take_over = matches!(wish, Wish::TakeOver | Wish::Order(None));
        let order = if let Wish::Order(order) = wish { order } else { None };
        Self { member: member.to_owned(), holder, generation, take_over, order }
    }

    /// Whether it is for this host.
    pub(crate) fn is_of(&self, host: HostId) -> bool {
        self.holder.as_ref() == Some(&host.to_string())
    }

    /// Whether it is for this holder, or for one of several.
    pub(crate) fn is_of_holder(&self, holder: &HolderRecord) -> bool {
        let is_host = holder.mode == AccessMode::Shared || self.is_of(holder.host);
        self.holder.is_some() && is_host && self.generation == holder.generation.0
    }

    pub(super) fn parse(text: &[u8]) -> Option<Self> {
        serde_json::from_slice(text).ok()
    }
}

/// The number of a question.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct AskTicket {
    pub(super) notice: u64,
    pub(super) watch: u64,
}

/// An answer, with the epoch of the owner that gives it.
#[derive(Serialize, Deserialize)]
pub(super) struct SaidAnswer {
    pub epoch: u64,
    pub answer: AskAnswer,
    /// Why an owner stays, for people.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub why: Option<String>,
}

/// The bytes of a notice.
///
/// # Safety
/// `data` points to so many bytes, or is null.
pub(super) unsafe fn receive(data: *const c_void, len: usize) -> Vec<u8> {
    if data.is_null() || len > TEXT_MAX {
        return Vec::new();
    }
    // SAFETY: by the contract of this function.
    unsafe { std::slice::from_raw_parts(data.cast::<u8>(), len) }.to_vec()
}

/// Answers a notice. Errors show to the member that sent it: it gets no answer.
pub(super) fn say(object: &StateObject, ticket: AskTicket, answer: &impl Serialize) {
    let said = serde_json::to_vec(answer).unwrap_or_default();
    // SAFETY: an open pool; the text lives as long as the call.
    let sent = checked(unsafe {
        (object.library().rados_notify_ack)(
            object.pool(),
            object.object().as_ptr(),
            ticket.notice,
            ticket.watch,
            said.as_ptr().cast::<c_char>(),
            c_len(said.len()),
        )
    });
    if let Err(errno) = sent {
        tracing::warn!(object = object.name(), %errno, "cannot answer another member");
    }
}

/// Asks the owner in this epoch. None: it does not answer. Blocks for [`ANSWER_DEADLINE`] at most,
/// if the cluster answers.
pub(super) fn ask(
    object: &StateObject,
    epoch: u64,
    question: &Ask,
) -> Result<Option<SaidAnswer>, Errno> {
    let text = serde_json::to_vec(question).map_err(|_| Errno::EINVAL)?;
    let began = Instant::now();
    loop {
        let left = ANSWER_DEADLINE.saturating_sub(began.elapsed());
        let replies = notify(object, &text, left)?;
        let said = answers_in(&replies).find(|said: &SaidAnswer| said.epoch == epoch);
        if said.is_some() || began.elapsed() + ASK_PAUSE >= ANSWER_DEADLINE {
            return Ok(said);
        }
        // Nobody watches: the owner is dead, or is about to begin its watch.
        thread::sleep(ASK_PAUSE);
        if began.elapsed() >= NOBODY_WATCHES {
            return Ok(None);
        }
    }
}

/// Sends a notice to all that watch the object. Returns the replies, which are fewer than the
/// watchers after the deadline, and none if there is no object.
pub(super) fn notify(
    object: &StateObject,
    text: &[u8],
    deadline: Duration,
) -> Result<Vec<u8>, Errno> {
    // librados cuts off the parts of a second, and takes 0 for its default of 30 s.
    let within = deadline.as_millis().div_ceil(1000).max(1) * 1000;
    let within = u64::try_from(within).unwrap_or(u64::MAX);
    let (mut replies, mut len) = (ptr::null_mut::<c_char>(), 0);
    // SAFETY: an open pool; the text lives as long as the call, which makes the buffer of replies.
    let asked = checked(unsafe {
        (object.library().rados_notify2)(
            object.pool(),
            object.object().as_ptr(),
            text.as_ptr().cast::<c_char>(),
            c_len(text.len()),
            within,
            &raw mut replies,
            &raw mut len,
        )
    });
    // SAFETY: the buffer that the call made, with so many bytes.
    let bytes = unsafe { receive(replies.cast(), len) };
    if !replies.is_null() {
        // SAFETY: made by the call, and not used any more.
        unsafe { (object.library().rados_buffer_free)(replies) };
    }
    match asked {
        // Some watcher did not answer: a former owner, perhaps.
        Ok(_) | Err(Errno::ETIMEDOUT | Errno::ENOENT) => Ok(bytes),
        Err(errno) => Err(errno),
    }
}

/// The answers in the replies to a notice, which `rados_notify2` describes: their number, and for
/// each one its client, its watch, its length and its bytes.
pub(super) fn answers_in<T: DeserializeOwned>(replies: &[u8]) -> impl Iterator<Item = T> {
    let mut rest = replies;
    let mut left = take_u32(&mut rest).unwrap_or(0);
    std::iter::from_fn(move || {
        left = left.checked_sub(1)?;
        rest = rest.get(16..)?;
        let len = usize::try_from(take_u32(&mut rest)?).ok()?;
        let (text, behind) = rest.split_at_checked(len)?;
        rest = behind;
        Some(serde_json::from_slice(text).ok())
    })
    .flatten()
}

fn take_u32(bytes: &mut &[u8]) -> Option<u32> {
    let (number, rest) = bytes.split_first_chunk::<4>()?;
    *bytes = rest;
    Some(u32::from_le_bytes(*number))
}

/// The length of a text that is far shorter than an integer of C can say.
fn c_len(len: usize) -> c_int {
    c_int::try_from(len).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use rblk_protocol::{Generation, Name};

    use super::*;

    fn reply(text: &str) -> Vec<u8> {
        let len = u32::try_from(text.len()).unwrap();
        [&[7; 16][..], &len.to_le_bytes(), text.as_bytes()].concat()
    }

    #[test]
    fn the_answer_of_the_owner_is_found_among_others() {
        let said = [
            reply(""),
            reply("{\"epoch\":3,\"answer\":\"stays\",\"why\":\"it is busy\"}"),
            reply("{\"epoch\":4,\"answer\":\"hands-over\"}"),
        ];
        let replies = [&3_u32.to_le_bytes()[..], &said.concat(), &0_u32.to_le_bytes()].concat();
        let found =
            answers_in(&replies).map(|said: SaidAnswer| (said.epoch, said.answer, said.why));
        let why = Some("it is busy".to_owned());
        assert_eq!(
            found.collect::<Vec<_>>(),
            [(3, AskAnswer::Stays, why), (4, AskAnswer::HandsOver, None)]
        );
        for len in 0..replies.len() {
            // A part of it is no panic.
            assert!(answers_in::<SaidAnswer>(&replies[..len]).count() <= 2);
        }
    }

    #[test]
    fn a_question_is_of_a_holder_in_one_generation_or_of_one_of_several() {
        let (host, other, generation) = (HostId([5; 16]), HostId([6; 16]), Generation(9));
        let ask = Ask::of("b", Wish::Return(host, generation));
        assert_eq!(Ask::parse(&serde_json::to_vec(&ask).unwrap()), Some(ask.clone()));
        let exclusive = HolderRecord {
            volume: [1; 16],
            generation,
            mode: AccessMode::Exclusive,
            host,
            host_name: Name::new("h").unwrap(),
            present: true,
        };
        let shared = HolderRecord { mode: AccessMode::Shared, host: other, ..exclusive.clone() };
        assert!(ask.is_of(host) && !ask.is_of(other));
        assert!(ask.is_of_holder(&exclusive));
        assert!(ask.is_of_holder(&shared), "the record names the first of them");
        for record in [exclusive.clone(), shared] {
            let later = HolderRecord { generation: Generation(10), ..record.clone() };
            assert!(!ask.is_of_holder(&later));
            assert!(!Ask::of("b", Wish::TakeOver).is_of_holder(&record));
            assert!(!Ask::of("b", Wish::Fresh).is_of_holder(&record));
            assert!(!Ask::of("b", Wish::Order(Some(3))).is_of_holder(&record));
        }
        assert!(!ask.is_of_holder(&HolderRecord { host: other, ..exclusive }));
        assert_eq!(Ask::parse(b"{"), None);
    }
}
