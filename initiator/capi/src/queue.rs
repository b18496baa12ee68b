//! Queues: their buffers, and `rblk_poll`, `rblk_wait` and `rblk_arm`.

use std::ffi::{c_int, c_void};
use std::os::fd::AsRawFd;
use std::sync::Mutex;
use std::time::Duration;

use rblk_client::{Buffer, Completion, Queue, Request};

use crate::call::{call, fill};
use crate::failure::CallFailure;
use crate::handle::{HandleContent, ProgramHandle, opened};

/// A queue: `struct rblk_queue`.
pub(crate) type QueueHandle = ProgramHandle<Driven>;

impl HandleContent for Driven {
    fn closed() -> &'static Mutex<Vec<&'static ProgramHandle<Self>>> {
        static CLOSED: Mutex<Vec<&QueueHandle>> = Mutex::new(Vec::new());
        &CLOSED
    }
}

/// The end of a request: `struct rblk_completion`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct rblk_completion {
    /// The number of the request.
    pub(crate) user_data: u64,
    /// Bytes moved, or a negative errno.
    pub(crate) result: i64,
    /// The buffer of a read or a write.
    pub(crate) buffer: *mut c_void,
}

/// The counters of a queue: `struct rblk_counts`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct rblk_counts {
    /// Bytes of the structure that the program knows.
    pub(crate) size: usize,
    /// Answered requests, errors included.
    pub(crate) answered: u64,
    /// Requests that failed.
    pub(crate) errors: u64,
    /// Bytes read.
    pub(crate) read_bytes: u64,
    /// Bytes written.
    pub(crate) written_bytes: u64,
    /// Bytes that the library copied.
    pub(crate) copied_bytes: u64,
    /// Requests sent again.
    pub(crate) sent_again: u64,
    /// Connections that ended.
    pub(crate) paths_lost: u64,
    /// Sleeps.
    pub(crate) sleeps: u64,
}

/// The address of a buffer.
#[derive(Clone, Copy, PartialEq, Eq)]
struct BufferAddress(*mut u8);

// SAFETY: only the address is used: nothing here reads or writes the memory behind it.
unsafe impl Send for BufferAddress {}

/// A queue with its buffers, and the completions that the program did not receive yet.
pub(crate) struct Driven {
    queue: Queue,
    /// By number. A buffer is in its request, or here.
    buffers: Box<[Option<Buffer>]>,
    /// Addresses of the buffers, in the order of the numbers. They do not move.
    places: Box<[BufferAddress]>,
    /// Bytes of each.
    capacity: usize,
    done: Vec<Completion>,
    /// Of `done`, the number of delivered completions.
    told: usize,
}

impl Driven {
    /// A queue with all its buffers free.
    pub(crate) fn new(mut queue: Queue) -> Result<Self, CallFailure> {
        let mut buffers: Vec<Buffer> = std::iter::from_fn(|| queue.buffer()).collect();
        buffers.sort_by_key(|buffer| buffer.as_ptr().addr());
        let Some(capacity) = buffers.first().map(Buffer::capacity) else {
            return Err(CallFailure::new(libc::ENOMEM, "a queue without a buffer"));
        };
        let places = buffers.iter_mut().map(|buffer| BufferAddress(buffer.as_mut_ptr())).collect();
        let buffers = buffers.into_iter().map(Some).collect();
        let done = Vec::with_capacity(queue.depth());
        Ok(Self { queue, buffers, places, capacity, done, told: 0 })
    }

    /// The number of the buffer at that address.
    #[inline]
    fn number(&self, place: *const c_void) -> Result<usize, CallFailure> {
        // The buffers lie at equal distances.
        let first = self.places[0].0.addr();
        let distance = self.places.get(1).map_or(usize::MAX, |second| second.0.addr() - first);
        let guess = place.addr().wrapping_sub(first) / distance;
        match self.places.get(guess) {
            Some(found) if found.0.addr() == place.addr() => Ok(guess),
            _ => Err(CallFailure::misuse(
                "the data does not begin where a buffer of this queue does: see rblk_queue_buffer",
            )),
        }
    }

    /// Whether there is room for one more request.
    #[inline]
    fn check_room(&self) -> Result<(), CallFailure> {
        // Undelivered completions count, too: so their number is bounded.
        let untold = self.done.len() - self.told;
        if self.queue.under_way() + untold < self.queue.depth() {
            return Ok(());
        }
        let words = "as many requests as the queue is deep are under way: take completions first";
        Err(CallFailure::new(libc::EAGAIN, words))
    }

    /// Takes a request with data.
    #[inline]
    pub(crate) fn submit_data(
        &mut self,
        place: *const c_void,
        request: impl FnOnce(Buffer) -> Request,
    ) -> Result<(), CallFailure> {
        self.check_room()?;
        let number = self.number(place)?;
        let buffer = self.buffers[number].take().ok_or_else(|| {
            CallFailure::new(libc::EBUSY, "the buffer is in a request that is under way")
        })?;
        self.queue.submit(request(buffer)).map_err(|refused| {
            self.buffers[number] = refused.request.into_buffer();
            CallFailure::from(refused.reason)
        })
    }

    /// Takes a request without data.
    #[inline]
    pub(crate) fn submit(&mut self, request: Request) -> Result<(), CallFailure> {
        self.check_room()?;
        self.queue.submit(request).map_err(|refused| CallFailure::from(refused.reason))
    }

    /// Polls for completions, and delivers them.
    #[inline]
    fn look(
        &mut self,
        told: &mut CompletionArray,
        look: impl FnOnce(&mut Queue, &mut Vec<Completion>) -> std::io::Result<usize>,
    ) -> Result<c_int, CallFailure> {
        self.done.drain(..self.told);
        self.told = 0;
        let looked = look(&mut self.queue, &mut self.done);
        if let Err(error) = looked {
            // Deliver completions first.
            if self.done.is_empty() {
                return Err(CallFailure::of(libc::EIO, &error));
            }
        }
        while self.told < self.done.len() && told.has_room() {
            let Completion { token, result, buffer, .. } = &mut self.done[self.told];
            let result = match result {
                Ok(bytes) => i64::try_from(*bytes).unwrap_or(i64::MAX),
                Err(error) => -i64::from(error.errno()),
            };
            let (user_data, mut place) = (*token, std::ptr::null_mut());
            if let Some(mut buffer) = buffer.take() {
                place = buffer.as_mut_ptr().cast();
                if let Ok(number) = self.number(place) {
                    self.buffers[number] = Some(buffer);
                }
            }
            told.tell(rblk_completion { user_data, result, buffer: place });
            self.told += 1;
        }
        Ok(told.count)
    }
}

/// The place for delivered completions.
struct CompletionArray {
    place: *mut rblk_completion,
    most: c_int,
    count: c_int,
}

impl CompletionArray {
    /// # Safety
    /// `place` is valid for writing `most` completions, or `most` is not positive.
    unsafe fn new(place: *mut rblk_completion, most: c_int) -> Result<Self, CallFailure> {
        if most < 0 {
            return Err(CallFailure::misuse("a negative number of completions"));
        }
        if most > 0 && (place.is_null() || !place.is_aligned()) {
            return Err(CallFailure::misuse("a null pointer where completions go"));
        }
        Ok(Self { place, most, count: 0 })
    }

    #[inline]
    fn has_room(&self) -> bool {
        self.count < self.most
    }

    #[inline]
    fn tell(&mut self, completion: rblk_completion) {
        if let Ok(at) = usize::try_from(self.count)
            && self.has_room()
        {
            // SAFETY: the place is valid for `most` of them.
            unsafe { self.place.add(at).write(completion) };
            self.count += 1;
        }
    }
}

/// Runs a closure with a queue.
///
/// # Safety
/// `queue` is null, or a handle of `rblk_queue_create`.
#[inline]
pub(crate) unsafe fn with<T: From<i32>>(
    queue: *mut QueueHandle,
    work: impl FnOnce(&mut Driven) -> Result<T, CallFailure>,
) -> T {
    call(|| {
        // SAFETY: as the caller says.
        let mut open = unsafe { ProgramHandle::enter(queue) }?;
        work(opened(&mut open)?)
    })
}

/// Destroys a queue.
///
/// # Safety
/// As `rblk.h` says.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn rblk_queue_destroy(queue: *mut QueueHandle) -> c_int {
    call(|| {
        // SAFETY: null, or a handle of `rblk_queue_create`, as the caller says.
        drop(unsafe { ProgramHandle::close(queue) }?);
        Ok(0)
    })
}

/// The depth of the queue: the limit of its requests at once.
///
/// # Safety
/// As `rblk.h` says.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn rblk_queue_depth(queue: *mut QueueHandle) -> c_int {
    // SAFETY: null, or a handle of `rblk_queue_create`, as the caller says.
    unsafe { with(queue, |driven| Ok(count(driven.queue.depth()))) }
}

/// Buffers of the queue.
///
/// # Safety
/// As `rblk.h` says.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn rblk_queue_buffers(queue: *mut QueueHandle) -> c_int {
    // SAFETY: null, or a handle of `rblk_queue_create`, as the caller says.
    unsafe { with(queue, |driven| Ok(count(driven.places.len()))) }
}

fn count(count: usize) -> c_int {
    c_int::try_from(count).unwrap_or(c_int::MAX)
}

/// Bytes of each buffer.
///
/// # Safety
/// As `rblk.h` says.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn rblk_queue_buffer_size(queue: *mut QueueHandle) -> i64 {
    // SAFETY: null, or a handle of `rblk_queue_create`, as the caller says.
    unsafe { with(queue, |driven| Ok(i64::try_from(driven.capacity).unwrap_or(i64::MAX))) }
}

/// A buffer of the queue; null for an unknown number.
///
/// # Safety
/// As `rblk.h` says.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn rblk_queue_buffer(
    queue: *mut QueueHandle,
    number: c_int,
) -> *mut c_void {
    let mut place = std::ptr::null_mut();
    // SAFETY: null, or a handle of `rblk_queue_create`, as the caller says.
    let _: c_int = unsafe {
        with(queue, |driven| {
            let number = usize::try_from(number).ok();
            let found = number.and_then(|number| driven.places.get(number));
            let found = found.ok_or_else(|| {
                CallFailure::misuse("a number of a buffer that the queue does not have")
            })?;
            place = found.0.cast();
            Ok(0)
        })
    };
    place
}

/// A descriptor to sleep on.
///
/// # Safety
/// As `rblk.h` says.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn rblk_event_fd(queue: *mut QueueHandle) -> c_int {
    // SAFETY: null, or a handle of `rblk_queue_create`, as the caller says.
    unsafe { with(queue, |driven| Ok(driven.queue.event_fd().as_raw_fd())) }
}

/// Makes the descriptor readable at the next event. Returns the milliseconds that the program may
/// sleep; 0 when `rblk_poll` is due.
///
/// # Safety
/// As `rblk.h` says.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn rblk_arm(queue: *mut QueueHandle) -> c_int {
    let arm = |driven: &mut Driven| {
        if driven.told < driven.done.len() {
            return Ok(0);
        }
        let longest = driven.queue.arm().map_err(|error| CallFailure::of(libc::EIO, &error))?;
        Ok(longest.map_or(0, milliseconds))
    };
    // SAFETY: null, or a handle of `rblk_queue_create`, as the caller says.
    unsafe { with(queue, arm) }
}

/// Whole milliseconds, rounded up: otherwise the program would loop without sleeping until the time
/// is over.
fn milliseconds(time: Duration) -> c_int {
    c_int::try_from(time.as_nanos().div_ceil(1_000_000)).unwrap_or(c_int::MAX)
}

/// Sends the submitted requests, and delivers the completions that have arrived.
///
/// # Safety
/// As `rblk.h` says.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn rblk_poll(
    queue: *mut QueueHandle,
    completions: *mut rblk_completion,
    most: c_int,
) -> c_int {
    let poll = |driven: &mut Driven| {
        // SAFETY: a place for `most` completions, as the caller says.
        let mut told = unsafe { CompletionArray::new(completions, most) }?;
        driven.look(&mut told, Queue::poll)
    };
    // SAFETY: null, or a handle of `rblk_queue_create`, as the caller says.
    unsafe { with(queue, poll) }
}

/// Like `rblk_poll`, but sleeps until the next event, or for so many milliseconds.
///
/// # Safety
/// As `rblk.h` says.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn rblk_wait(
    queue: *mut QueueHandle,
    completions: *mut rblk_completion,
    most: c_int,
    longest_ms: c_int,
) -> c_int {
    let wait = |driven: &mut Driven| {
        // SAFETY: a place for `most` completions, as the caller says.
        let mut told = unsafe { CompletionArray::new(completions, most) }?;
        let Ok(longest) = u64::try_from(longest_ms) else {
            return Err(CallFailure::misuse("a negative time to wait: every wait has an end"));
        };
        let longest = Duration::from_millis(longest);
        driven.look(&mut told, |queue, done| match done.is_empty() {
            true => queue.wait(done, longest),
            false => queue.poll(done),
        })
    };
    // SAFETY: null, or a handle of `rblk_queue_create`, as the caller says.
    unsafe { with(queue, wait) }
}

/// Returns the counters of a queue.
///
/// # Safety
/// As `rblk.h` says.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn rblk_queue_counts(
    queue: *mut QueueHandle,
    counts: *mut rblk_counts,
) -> c_int {
    let tell = |driven: &mut Driven| {
        let now = driven.queue.counts();
        let now = rblk_counts {
            size: 0,
            answered: now.answered,
            errors: now.errors,
            read_bytes: now.read_bytes,
            written_bytes: now.written_bytes,
            copied_bytes: now.copied_bytes,
            sent_again: now.sent_again,
            paths_lost: now.paths_lost,
            sleeps: now.sleeps,
        };
        // SAFETY: null, or valid for the bytes that it says, as the caller says.
        unsafe { fill(counts, now, |now, size| now.size = size) }?;
        Ok(0)
    };
    // SAFETY: null, or a handle of `rblk_queue_create`, as the caller says.
    unsafe { with(queue, tell) }
}
