//! [`FrontEnd`]: the requests of one front end, in order, until it leaves: it agrees on features,
//! shares the memory of its guest, and starts and stops rings.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::Duration;

use super::event::{Kick, NotifyFd, must_be_eventfd};
use super::front_end_socket::{FrontEndMessage, FrontEndSocket, broken, must_be_unix_socket};
use super::guest_device::GuestDevice;
use super::guest_disk::{GuestDisk, PROTOCOL_FEATURES};
use super::guest_memory::GuestMemory;
use super::guest_ring::{RingParts, SIZE_MAX};
use super::ring_orders::RingOrder;
use super::vhost_user::{
    Broken, FrontEndRequest, MemoryPart, MessageHeader, RingEvent, RingPlaces, config_change,
    protocol,
};

/// Time that a front end waits for answers of the target when it stops a ring.
const PATIENCE: Duration = Duration::from_secs(5);
/// That time after the front end has gone.
const LAST_PATIENCE: Duration = Duration::from_secs(1);

/// Refusals that are logged for each front end.
const REFUSALS_TOLD: u32 = 8;

/// The settings of a stopped ring, and the descriptors of a running one.
#[derive(Debug, Default)]
struct RingState {
    size: Option<u16>,
    places: Option<RingPlaces>,
    base: u16,
    call: Option<NotifyFd>,
    error: Option<NotifyFd>,
    runs: bool,
    enabled: bool,
}

/// One front end.
#[derive(Debug)]
pub(super) struct FrontEnd<'d> {
    device: &'d mut GuestDevice,
    connection: FrontEndSocket,
    back_channel: Option<FrontEndSocket>,
    features: u64,
    protocol: u64,
    memory: Option<Arc<GuestMemory>>,
    rings: Vec<RingState>,
    // A ring was started.
    has_served: bool,
    refusals: u32,
    // The disk's state that the front end knows.
    told: GuestDisk,
}

impl<'d> FrontEnd<'d> {
    /// A front end that has just connected.
    pub(super) fn new(stream: UnixStream, device: &'d mut GuestDevice) -> Self {
        let rings = (0..device.rings()).map(|_| RingState::default()).collect();
        let (told, ends) = (device.disk(), device.news().ends_flag());
        Self {
            connection: FrontEndSocket::new(stream, ends),
            device,
            back_channel: None,
            features: 0,
            protocol: 0,
            memory: None,
            rings,
            has_served: false,
            refusals: 0,
            told,
        }
    }

    /// Readable when a message has come.
    pub(super) fn socket(&self) -> BorrowedFd<'_> {
        self.connection.as_fd()
    }

    /// Whether the front end has started a ring, also one that was left alone.
    pub(super) fn has_served(&self) -> bool {
        self.has_served
    }

    /// Receives a message and carries it out. Returns whether the front end is still connected.
    ///
    /// # Errors
    /// The front end broke a rule, or the device broke: this end hangs up.
    pub(super) fn take_message(&mut self) -> io::Result<bool> {
        let Some(FrontEndMessage { header, request, mut files }) = self.connection.receive()?
        else {
            return Ok(false);
        };
        tracing::trace!(?request, files = files.len(), "vhost-user");
        let answer = self.answer(request, &mut files);
        // The remaining files are refused, or not needed.
        self.connection.put_away(files);
        match answer? {
            MessageAnswer::Bytes(bytes) => self.connection.send(&header.answer(&bytes))?,
            MessageAnswer::Done(done) => self.acknowledge(header, done)?,
        }
        Ok(true)
    }

    /// Replies to a request without a reply of its own, if the front end waits for one.
    fn acknowledge(&mut self, header: MessageHeader, done: io::Result<()>) -> io::Result<()> {
        if header.wants_answer() && self.protocol & protocol::REPLY_ACK != 0 {
            if let Err(error) = &done {
                self.tell_refusal(header, error);
            }
            let failed = u64::from(done.is_err());
            return self.connection.send(&header.answer(&failed.to_le_bytes()));
        }
        // The front end asked for no reply: return the error.
        done
    }

    /// Logs a refusal. A front end may send refused requests at any pace, so the number of lines is
    /// limited.
    fn tell_refusal(&mut self, header: MessageHeader, error: &io::Error) {
        self.refusals = self.refusals.saturating_add(1);
        if self.refusals <= REFUSALS_TOLD {
            let last = self.refusals == REFUSALS_TOLD;
            let request = header.number();
            tracing::warn!(request, %error, last, "refused a request of the front end");
        }
    }

    fn answer(
        &mut self,
        request: FrontEndRequest,
        files: &mut Vec<File>,
    ) -> io::Result<MessageAnswer> {
        let number = |number: u64| MessageAnswer::Bytes(number.to_le_bytes().to_vec());
        Ok(match request {
            FrontEndRequest::GetFeatures => number(self.device.disk().features()),
            FrontEndRequest::GetProtocolFeatures => number(protocol::ALL),
            FrontEndRequest::GetRings => number(self.rings.len() as u64),
            FrontEndRequest::GetConfig { offset, len } => {
                self.told = self.device.disk();
                let space = self.told.config(offset, len);
                let head = [offset, len].map(|n| u32::try_from(n).unwrap_or(u32::MAX));
                let mut bytes = [head[0], head[1], 0].map(u32::to_le_bytes).concat();
                bytes.extend(space);
                MessageAnswer::Bytes(bytes)
            }
            FrontEndRequest::GetRingBase { ring } => {
                let base = self.stop(ring)?;
                let index = u32::try_from(ring).unwrap_or(u32::MAX);
                MessageAnswer::Bytes([index, base.into()].map(u32::to_le_bytes).concat())
            }
            other => MessageAnswer::Done(self.change(other, files)),
        })
    }

    /// Carries out a request that has no reply of its own.
    fn change(&mut self, request: FrontEndRequest, files: &mut Vec<File>) -> io::Result<()> {
        match request {
            FrontEndRequest::SetOwner | FrontEndRequest::ResetOwner => Ok(()),
            FrontEndRequest::SetFeatures(features) => self.set_features(features),
            FrontEndRequest::SetProtocolFeatures(features) => {
                self.protocol = features & protocol::ALL;
                Ok(())
            }
            FrontEndRequest::SetMemory(table) => self.set_memory(&table, files),
            FrontEndRequest::SetRingSize { ring, size } => {
                let size = u16::try_from(size).ok().filter(|size| (1..=SIZE_MAX).contains(size));
                self.idle_ring(ring)?.size =
                    Some(size.ok_or_else(|| rule("a ring of no size, or a longer one than 1024"))?);
                Ok(())
            }
            FrontEndRequest::SetRingPlaces { ring, places } => {
                self.idle_ring(ring)?.places = Some(places);
                Ok(())
            }
            FrontEndRequest::SetRingBase { ring, base } => {
                self.idle_ring(ring)?.base =
                    u16::try_from(base).map_err(|_| rule("the index is not in the ring"))?;
                Ok(())
            }
            FrontEndRequest::SetKick(event) => self.set_kick(event, files),
            FrontEndRequest::SetCall(event) => {
                let call = file(event, files)?.map(NotifyFd::new).transpose()?;
                let (ring, state) = self.ring(event.ring)?;
                if state.runs {
                    return self.device.order(ring, RingOrder::SetCall(call));
                }
                state.call = call;
                Ok(())
            }
            FrontEndRequest::SetError(event) => {
                let error = file(event, files)?.map(NotifyFd::new).transpose()?;
                let (ring, state) = self.ring(event.ring)?;
                if state.runs {
                    return self.device.order(ring, RingOrder::SetError(error));
                }
                state.error = error;
                Ok(())
            }
            FrontEndRequest::EnableRing { ring, enable } => {
                let (ring, state) = self.ring(ring)?;
                state.enabled = enable;
                self.device.order(ring, RingOrder::Enable(enable))
            }
            FrontEndRequest::SetBackChannel => {
                let no_file = || rule("a channel without a descriptor");
                must_be_unix_socket(files.last().ok_or_else(no_file)?)?;
                let stream = files.pop().map(|file| UnixStream::from(OwnedFd::from(file)));
                let ends = self.device.news().ends_flag();
                self.back_channel = stream.map(|stream| FrontEndSocket::new(stream, ends));
                Ok(())
            }
            // The target decides about the cache of a volume.
            FrontEndRequest::SetConfig => {
                Err(io::Error::other("the configuration cannot be written"))
            }
            _ => Err(rule("a request that was not agreed on")),
        }
    }

    fn ring(&mut self, ring: usize) -> io::Result<(usize, &mut RingState)> {
        let state = self.rings.get_mut(ring);
        state.map(|state| (ring, state)).ok_or_else(|| rule("no such ring: see --queues"))
    }

    /// A ring that is not running, for new settings.
    fn idle_ring(&mut self, ring: usize) -> io::Result<&mut RingState> {
        let (_, state) = self.ring(ring)?;
        if state.runs { Err(rule("a ring that is served cannot be changed")) } else { Ok(state) }
    }

    fn set_features(&mut self, features: u64) -> io::Result<()> {
        if features & !self.device.disk().features() != 0 {
            return Err(rule("it takes abilities that were not offered"));
        }
        self.features = features;
        let flushed = GuestDisk::is_flushed(features);
        (0..self.rings.len())
            .try_for_each(|ring| self.device.order(ring, RingOrder::Flushed(flushed)))
    }

    fn set_memory(&mut self, table: &[MemoryPart], files: &[File]) -> io::Result<()> {
        if files.len() != table.len() {
            return Err(rule("memory without a descriptor for each region"));
        }
        let memory =
            GuestMemory::map(table, files, self.memory.as_deref(), self.device.memory_max())?;
        let memory = Arc::new(memory);
        self.device.set_memory(Some(&memory))?;
        self.memory = Some(memory);
        Ok(())
    }

    fn set_kick(&mut self, event: RingEvent, files: &mut Vec<File>) -> io::Result<()> {
        let kick = file(event, files)?;
        let (features, memory) = (self.features, self.memory.clone());
        let state = self.idle_ring(event.ring)?;
        let kick = kick.ok_or_else(|| rule("a ring that is to be looked at without kicks"))?;
        let kick = Kick::new(kick)?;
        let (Some(size), Some(places)) = (state.size, state.places) else {
            return Err(rule("a ring is started that was not described"));
        };
        let RingPlaces { descriptors, available, used } = places;
        let memory = memory.ok_or_else(|| rule("a ring is started without memory"))?;
        let places = [descriptors, available, used].map(|place| memory.guest_address(place));
        let [Some(descriptors), Some(available), Some(used)] = places else {
            return Err(rule("a ring outside of the guest's memory"));
        };
        let parts = RingParts {
            size,
            descriptors,
            available,
            used,
            base: state.base,
            event_index: GuestDisk::has_event_index(features),
            kick,
            call: state.call.take(),
            error: state.error.take(),
            in_doubt: false,
        };
        let enabled = state.enabled || features & PROTOCOL_FEATURES == 0;
        self.has_served = true;
        self.device.start(event.ring, parts)?;
        self.rings[event.ring].runs = true;
        self.device.order(event.ring, RingOrder::Enable(enabled))
    }

    /// Stops a ring. Returns the index of its next request.
    fn stop(&mut self, ring: usize) -> io::Result<u16> {
        let (ring, state) = self.ring(ring)?;
        let (runs, base) = (state.runs, state.base);
        *state = RingState { base, ..RingState::default() };
        if !runs {
            return Ok(base);
        }
        let base = self.device.stop(ring, PATIENCE)?;
        self.rings[ring].base = base;
        Ok(base)
    }

    /// Notifies the front end if the disk has changed.
    ///
    /// # Errors
    /// The front end does not take the message.
    pub(super) fn tell_changes(&mut self) -> io::Result<()> {
        let disk = self.device.disk();
        if disk == self.told {
            return Ok(());
        }
        self.told = disk;
        match &mut self.back_channel {
            Some(channel) => channel.send(&config_change()),
            None => Ok(()),
        }
    }

    /// The front end has gone: stops its rings, makes the guest's writes durable if possible, and
    /// gives its memory back. To give memory back ends the session, so the FLUSH comes first.
    ///
    /// # Errors
    /// The device is broken.
    pub(super) fn leave(self) -> io::Result<()> {
        let Self { device, rings, .. } = self;
        let runs = rings.iter().enumerate().filter(|(_, ring)| ring.runs).map(|(at, _)| at);
        device.stop_all(runs, LAST_PATIENCE)?;
        device.flush()?;
        device.set_memory(None)
    }
}

enum MessageAnswer {
    Bytes(Vec<u8>),
    Done(io::Result<()>),
}

fn rule(text: &'static str) -> io::Error {
    broken(Broken(text))
}

/// The descriptor of a ring's event, an eventfd. A refused file stays in `files`.
fn file(event: RingEvent, files: &mut Vec<File>) -> io::Result<Option<File>> {
    match (event.has_descriptor, files.last()) {
        (true, None) => Err(rule("an event without a descriptor")),
        (true, Some(last)) => {
            must_be_eventfd(last)?;
            Ok(files.pop())
        }
        (false, _) => Ok(None),
    }
}
