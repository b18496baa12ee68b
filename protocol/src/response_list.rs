//! [`ResponseList`]: the responses of one message, one behind the other.

use crate::capsule::{CapsuleError, ResponseCapsule};
use crate::limits::{LIST_MAX, RESPONSE_BYTES};
use crate::tag::QueueDepth;

/// Walks the responses of one message.
#[derive(Clone, Copy, Debug)]
pub struct ResponseList {
    at: usize,
    end: usize,
    depth: QueueDepth,
    digests: bool,
}

impl ResponseList {
    /// The responses of a message of `message_bytes` bytes. `lists` says whether it may hold more
    /// than one.
    ///
    /// # Errors
    /// The message does not hold a whole number of responses, or none, or too many.
    pub fn new(message_bytes: usize, lists: bool, depth: QueueDepth) -> Result<Self, CapsuleError> {
        let most = RESPONSE_BYTES * if lists { LIST_MAX } else { 1 };
        let whole = message_bytes.next_multiple_of(RESPONSE_BYTES);
        let expected = whole.clamp(RESPONSE_BYTES, most);
        if message_bytes != expected {
            return Err(CapsuleError::Length { got: message_bytes, expected });
        }
        Ok(Self { at: 0, end: message_bytes, depth, digests: false })
    }

    /// Reads a message; if `digests`, each response must have its digest.
    #[must_use]
    #[inline]
    pub fn with_digests(self, digests: bool) -> Self {
        Self { digests, ..self }
    }

    /// The next response. `None` after the last. `read` copies the bytes at that offset of the
    /// message. After an error there are no more responses.
    #[inline(always)]
    pub fn take(
        &mut self,
        read: impl FnOnce(usize, &mut [u8; RESPONSE_BYTES]),
    ) -> Option<Result<ResponseCapsule, CapsuleError>> {
        if self.at >= self.end {
            return None;
        }
        let mut bytes = [0; RESPONSE_BYTES];
        read(self.at, &mut bytes);
        self.at += RESPONSE_BYTES;
        let response = if self.digests && !ResponseCapsule::has_its_digest(&bytes) {
            Err(CapsuleError::Digest)
        } else {
            ResponseCapsule::from_wire(&bytes, RESPONSE_BYTES, self.depth)
        };
        if response.is_err() {
            self.at = self.end;
        }
        Some(response)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Sequence, Status, Tag};
    use proptest::prelude::*;

    fn depth() -> QueueDepth {
        QueueDepth::new(128).unwrap()
    }

    fn responses(message: &[u8], lists: bool) -> (Vec<ResponseCapsule>, Option<CapsuleError>) {
        let mut list = match ResponseList::new(message.len(), lists, depth()) {
            Ok(list) => list,
            Err(error) => return (Vec::new(), Some(error)),
        };
        let mut seen = Vec::new();
        while let Some(response) = list.take(|at, bytes| {
            bytes.copy_from_slice(&message[at..at + RESPONSE_BYTES]);
        }) {
            match response {
                Ok(response) => seen.push(response),
                Err(error) => {
                    assert!(list.take(|_, _| panic!("behind an error")).is_none());
                    return (seen, Some(error));
                }
            }
        }
        (seen, None)
    }

    #[test]
    fn golden_response_list() {
        let golden = [
            [0x7f, 0, 11, 0, 4, 3, 2, 1, 9, 0, 0, 0, 0xef, 0xbe, 0, 0],
            [1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0x22, 0, 0, 0],
        ];
        let first = ResponseCapsule {
            tag: Tag(0x7f),
            status: Status::NoSpace,
            digest: 0x0102_0304,
            value: 9,
            check: 0xbeef,
        };
        let second = ResponseCapsule::new(Tag(1), Sequence(0x22), Status::Ok);
        assert_eq!([first.to_wire(), second.to_wire()], golden);
        assert_eq!(responses(golden.as_flattened(), true), (vec![first, second], None));
    }

    #[test]
    fn without_the_feature_a_message_is_one_capsule() {
        let response = ResponseCapsule::new(Tag(1), Sequence(2), Status::Ok);
        let twice = [response.to_wire(), response.to_wire()];
        let error = CapsuleError::Length { got: 32, expected: 16 };
        assert_eq!(responses(twice.as_flattened(), false), (vec![], Some(error)));
        assert_eq!(responses(&response.to_wire(), false), (vec![response], None));
    }

    #[test]
    fn a_list_has_an_end() {
        let response = ResponseCapsule::new(Tag(1), Sequence(2), Status::Ok).to_wire();
        assert_eq!(responses(&response.repeat(LIST_MAX), true).0.len(), LIST_MAX);
        for (bytes, expected) in [(0, 16), (1, 16), (15, 16), (17, 32), (255, 256), (272, 256)] {
            let error = CapsuleError::Length { got: bytes, expected };
            assert_eq!(responses(&vec![0; bytes], true), (vec![], Some(error)));
        }
    }

    proptest! {
        #[test]
        fn any_bytes_are_survived(bytes: Vec<u8>, len in 0usize..5000, lists: bool) {
            let mut message = bytes;
            message.resize(len, 0);
            let (seen, _) = responses(&message, lists);
            let most = if lists { LIST_MAX } else { 1 };
            prop_assert!(seen.len() <= most);
        }

        #[test]
        fn any_responses_are_read_as_packed(tags in prop::collection::vec(0u16..=128, 1..=LIST_MAX), check: u16) {
            let list: Vec<_> = tags
                .iter()
                .map(|tag| ResponseCapsule::new(Tag(*tag), Sequence(check.into()), Status::Ok))
                .collect();
            let bytes: Vec<u8> = list.iter().flat_map(ResponseCapsule::to_wire).collect();
            prop_assert_eq!(responses(&bytes, true), (list, None));
        }
    }
}
