//! The messages of vhost-user, as bytes in and [`FrontEndRequest`]s out, and answers the other way.
//! Pure: descriptors and sockets are [`front_end_socket`](super::front_end_socket)'s.
//!
//! The numbers are those of the specification (QEMU, `docs/interop/vhost-user.rst`).

/// Bytes of a header: request, flags, size of the body.
pub(super) const HEADER_BYTES: usize = 12;
/// Limit of a body's length: the longest known body is a table of memory.
pub(super) const BODY_MAX: usize = 4096;
/// Limit of the regions in a table of memory, and so of the descriptors of a message.
pub(super) const REGIONS_MAX: usize = 8;

/// The version in every message.
const VERSION: u32 = 1;
const VERSION_MASK: u32 = 3;
const REPLY: u32 = 1 << 2;
const NEED_REPLY: u32 = 1 << 3;
/// In the number of a ring: the message has no descriptor.
const NO_DESCRIPTOR: u64 = 1 << 8;
/// The message about a new configuration: VHOST_USER_BACKEND_CONFIG_CHANGE_MSG.
const CONFIG_CHANGE: u32 = 2;

/// The features of the protocol that rblk uses.
pub(super) mod protocol {
    /// Several rings.
    pub(in crate::front::vhost) const MQ: u64 = 1 << 0;
    /// Replies to requests that have none of their own.
    pub(in crate::front::vhost) const REPLY_ACK: u64 = 1 << 3;
    /// A channel for messages of this end.
    pub(in crate::front::vhost) const BACKEND_REQ: u64 = 1 << 5;
    /// This end has the configuration of the device.
    pub(in crate::front::vhost) const CONFIG: u64 = 1 << 9;
    /// All these features.
    pub(in crate::front::vhost) const ALL: u64 = MQ | REPLY_ACK | BACKEND_REQ | CONFIG;
}

/// A header.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct MessageHeader {
    request: u32,
    flags: u32,
    /// Bytes of the body.
    pub(super) len: usize,
}

/// A region of the guest's memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct MemoryPart {
    /// First guest address.
    pub(super) guest: u64,
    /// Bytes.
    pub(super) len: u64,
    /// First address in the front end.
    pub(super) user: u64,
    /// Offset in the file.
    pub(super) offset: u64,
}

/// The addresses of a ring, in the front end.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct RingPlaces {
    /// The descriptor table.
    pub(super) descriptors: u64,
    /// The available ring.
    pub(super) available: u64,
    /// The used ring.
    pub(super) used: u64,
}

/// A ring, and whether the message has a descriptor for it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct RingEvent {
    /// The index of the ring.
    pub(super) ring: usize,
    /// Whether the message must have a descriptor.
    pub(super) has_descriptor: bool,
}

/// A request of a front end.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) enum FrontEndRequest {
    GetFeatures,
    SetFeatures(u64),
    SetOwner,
    ResetOwner,
    SetMemory(Vec<MemoryPart>),
    SetRingSize {
        ring: usize,
        size: u32,
    },
    SetRingPlaces {
        ring: usize,
        places: RingPlaces,
    },
    SetRingBase {
        ring: usize,
        base: u32,
    },
    GetRingBase {
        ring: usize,
    },
    SetKick(RingEvent),
    SetCall(RingEvent),
    SetError(RingEvent),
    GetProtocolFeatures,
    SetProtocolFeatures(u64),
    GetRings,
    EnableRing {
        ring: usize,
        enable: bool,
    },
    SetBackChannel,
    GetConfig {
        offset: usize,
        len: usize,
    },
    SetConfig,
    /// A request outside the agreed features.
    Unknown,
}

/// A message breaks a rule: the connection ends.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("the front end broke a rule of vhost-user: {0}")]
pub(super) struct Broken(pub(super) &'static str);

impl MessageHeader {
    /// Parses a header.
    pub(super) fn parse(bytes: [u8; HEADER_BYTES]) -> Result<Self, Broken> {
        let mut fields = Fields(&bytes);
        let (request, flags, len) = (fields.u32()?, fields.u32()?, fields.u32()?);
        if flags & VERSION_MASK != VERSION || flags & REPLY != 0 {
            return Err(Broken("a header of another version, or an answer to no question"));
        }
        let len = usize::try_from(len).ok().filter(|len| *len <= BODY_MAX);
        Ok(Self { request, flags, len: len.ok_or(Broken("a message that is too long"))? })
    }

    /// The number of the request, for people.
    pub(super) fn number(self) -> u32 {
        self.request
    }

    /// Whether the front end asks for an answer to this message.
    pub(super) fn wants_answer(self) -> bool {
        self.flags & NEED_REPLY != 0
    }

    /// Parses the body after the header.
    pub(super) fn request(self, body: &[u8]) -> Result<FrontEndRequest, Broken> {
        let mut fields = Fields(body);
        let request = match self.request {
            1 => FrontEndRequest::GetFeatures,
            2 => FrontEndRequest::SetFeatures(fields.u64()?),
            3 => FrontEndRequest::SetOwner,
            4 => FrontEndRequest::ResetOwner,
            5 => return memory(fields).map(FrontEndRequest::SetMemory),
            8 => FrontEndRequest::SetRingSize { ring: fields.ring()?, size: fields.u32()? },
            9 => ring_places(&mut fields)?,
            10 => FrontEndRequest::SetRingBase { ring: fields.ring()?, base: fields.u32()? },
            11 => {
                let ring = fields.ring()?;
                fields.u32()?;
                FrontEndRequest::GetRingBase { ring }
            }
            12 => FrontEndRequest::SetKick(fields.ring_event()?),
            13 => FrontEndRequest::SetCall(fields.ring_event()?),
            14 => FrontEndRequest::SetError(fields.ring_event()?),
            15 => FrontEndRequest::GetProtocolFeatures,
            16 => FrontEndRequest::SetProtocolFeatures(fields.u64()?),
            17 => FrontEndRequest::GetRings,
            18 => FrontEndRequest::EnableRing { ring: fields.ring()?, enable: fields.u32()? != 0 },
            21 => FrontEndRequest::SetBackChannel,
            24 => {
                let (offset, len) = (fields.u32()?, fields.u32()?);
                fields.u32()?;
                let all = |n: u32| usize::try_from(n).map_err(|_| Broken("a long configuration"));
                let (offset, len) = (all(offset)?, all(len)?);
                if len != fields.0.len() {
                    return Err(Broken("a configuration of another length than it says"));
                }
                return Ok(FrontEndRequest::GetConfig { offset, len });
            }
            25 => return Ok(FrontEndRequest::SetConfig),
            _ => return Ok(FrontEndRequest::Unknown),
        };
        match fields.0 {
            [] => Ok(request),
            _ => Err(Broken("a message that is longer than its request")),
        }
    }

    /// The answer to the message of this header.
    pub(super) fn answer(self, body: &[u8]) -> Vec<u8> {
        message(self.request, VERSION | REPLY, body)
    }
}

/// The message to a front end about a changed configuration of the device.
pub(super) fn config_change() -> Vec<u8> {
    message(CONFIG_CHANGE, VERSION, &[])
}

fn message(request: u32, flags: u32, body: &[u8]) -> Vec<u8> {
    // No body here is longer than the longest request.
    let len = u32::try_from(body.len()).unwrap_or(u32::MAX);
    let mut bytes = Vec::with_capacity(HEADER_BYTES + body.len());
    for field in [request, flags, len] {
        bytes.extend(field.to_le_bytes());
    }
    bytes.extend(body);
    bytes
}

fn memory(mut fields: Fields<'_>) -> Result<Vec<MemoryPart>, Broken> {
    let count = fields.u32()?;
    fields.u32()?;
    let count = usize::try_from(count).ok().filter(|count| (1..=REGIONS_MAX).contains(count));
    let count = count.ok_or(Broken("a table of no memory, or of more than 8 regions"))?;
    let mut parts = Vec::with_capacity(count);
    for _ in 0..count {
        let (guest, len) = (fields.u64()?, fields.u64()?);
        parts.push(MemoryPart { guest, len, user: fields.u64()?, offset: fields.u64()? });
    }
    // A front end may send the whole table, regardless of the number of regions.
    Ok(parts)
}

fn ring_places(fields: &mut Fields<'_>) -> Result<FrontEndRequest, Broken> {
    let ring = fields.ring()?;
    // Logging of writes to the used ring is not supported.
    fields.u32()?;
    let (descriptors, used) = (fields.u64()?, fields.u64()?);
    let places = RingPlaces { descriptors, used, available: fields.u64()? };
    fields.u64()?;
    Ok(FrontEndRequest::SetRingPlaces { ring, places })
}

/// The rest of a body.
struct Fields<'b>(&'b [u8]);

impl Fields<'_> {
    fn take<const N: usize>(&mut self) -> Result<[u8; N], Broken> {
        let (field, rest) = self.0.split_first_chunk().ok_or(Broken("a message that is cut"))?;
        self.0 = rest;
        Ok(*field)
    }

    fn u32(&mut self) -> Result<u32, Broken> {
        self.take().map(u32::from_le_bytes)
    }

    fn u64(&mut self) -> Result<u64, Broken> {
        self.take().map(u64::from_le_bytes)
    }

    fn ring(&mut self) -> Result<usize, Broken> {
        usize::try_from(self.u32()?).map_err(|_| Broken("no such ring"))
    }

    fn ring_event(&mut self) -> Result<RingEvent, Broken> {
        let word = self.u64()?;
        let ring = usize::from(word.to_le_bytes()[0]);
        Ok(RingEvent { ring, has_descriptor: word & NO_DESCRIPTOR == 0 })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn header(request: u32, len: u32) -> MessageHeader {
        let fields = [request, VERSION, len].map(u32::to_le_bytes).concat();
        MessageHeader::parse(fields.try_into().unwrap()).unwrap()
    }

    #[test]
    fn requests_come_as_they_were_sent() {
        let body = [[1, 0].map(u64::to_le_bytes), [2, 3].map(u64::to_le_bytes)].concat().concat();
        let body = [&body[..], &4u64.to_le_bytes()].concat();
        // One region: guest 0, 2 bytes, user 3, offset 4.
        let part = MemoryPart { guest: 0, len: 2, user: 3, offset: 4 };
        assert_eq!(header(5, 40).request(&body), Ok(FrontEndRequest::SetMemory(vec![part])));
        let state = [7u32, 9].map(u32::to_le_bytes).concat();
        assert_eq!(
            header(8, 8).request(&state),
            Ok(FrontEndRequest::SetRingSize { ring: 7, size: 9 })
        );
        let event = |word: u64| header(12, 8).request(&word.to_le_bytes()).unwrap();
        let kick =
            |ring, has_descriptor| FrontEndRequest::SetKick(RingEvent { ring, has_descriptor });
        assert_eq!((event(3), event(0x103)), (kick(3, true), kick(3, false)));
        assert_eq!(header(99, 0).request(&[]), Ok(FrontEndRequest::Unknown));
        let answer = header(1, 0).answer(&5u64.to_le_bytes());
        assert_eq!(
            answer,
            [&[1, 0, 0, 0, 5, 0, 0, 0, 8, 0, 0, 0][..], &5u64.to_le_bytes()].concat()
        );
    }

    #[test]
    fn invalid_messages_are_refused() {
        let parse = |fields: [u32; 3]| {
            MessageHeader::parse(fields.map(u32::to_le_bytes).concat().try_into().unwrap())
        };
        assert!(parse([1, 1, 4096]).is_ok());
        for bad in [[1, 1, 4097], [1, 1, u32::MAX], [1, 2, 0], [1, 5, 0]] {
            assert!(parse(bad).is_err(), "{bad:?}");
        }
        for count in [0u32, 9, u32::MAX] {
            let body = [count, 0].map(u32::to_le_bytes).concat();
            assert!(header(5, 8).request(&body).is_err(), "{count} regions");
        }
        assert!(header(2, 9).request(&[0; 9]).is_err());
        assert!(header(2, 7).request(&[0; 7]).is_err());
    }

    proptest! {
        #[test]
        fn any_bytes_parse_or_are_refused(
            request in 0u32..42,
            body in proptest::collection::vec(any::<u8>(), 0..400),
        ) {
            let _ = header(request, 0).request(&body);
        }
    }
}
