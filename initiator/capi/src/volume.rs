//! Volumes: `rblk_open` to `rblk_close`.

use std::ffi::c_int;
use std::sync::Mutex;

use rblk_client::{OpenError, State, Volume};

use crate::c_options::{self, rblk_options};
use crate::call::{call, fill, put};
use crate::failure::CallFailure;
use crate::handle::{HandleContent, ProgramHandle, opened};
use crate::queue::{Driven, QueueHandle};

/// A volume: `struct rblk_volume`.
pub(crate) type VolumeHandle = ProgramHandle<Volume>;

impl HandleContent for Volume {
    fn closed() -> &'static Mutex<Vec<&'static ProgramHandle<Self>>> {
        static CLOSED: Mutex<Vec<&VolumeHandle>> = Mutex::new(Vec::new());
        &CLOSED
    }
}

/// The state of a volume: `struct rblk_status`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct rblk_status {
    /// Bytes of the structure that the program knows.
    pub(crate) size: usize,
    /// Bytes of the volume.
    pub(crate) size_bytes: u64,
    /// Completed writes that no flush has covered.
    pub(crate) unflushed_writes: u64,
    /// How often the target lost such writes.
    pub(crate) losses: u64,
    /// Limit of the data of one request.
    pub(crate) max_io: u64,
    /// Bytes of a block.
    pub(crate) block_size: u32,
    /// `enum rblk_state`.
    pub(crate) state: u32,
    /// Whether the volume refuses writes.
    pub(crate) read_only: u32,
    /// Zero.
    pub(crate) reserved: u32,
}

/// The number of a state in `enum rblk_state`. `State` may grow: a state without a number counts as
/// one without service.
fn number(state: State) -> u32 {
    match state {
        State::Connected => 0,
        State::Failing => 2,
        State::Removed => 3,
        State::Fenced => 4,
        State::Changed => 5,
        _ => 1,
    }
}

fn not_open(error: &OpenError) -> CallFailure {
    CallFailure::of(if error.is_transient() { libc::EAGAIN } else { libc::EIO }, error)
}

/// Opens a volume.
///
/// # Safety
/// As `rblk.h` says.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn rblk_open(
    options: *const rblk_options,
    volume: *mut *mut VolumeHandle,
) -> c_int {
    call(|| {
        // SAFETY: null, or a place for a handle, as the caller says.
        unsafe { put(volume, std::ptr::null_mut()) }?;
        // SAFETY: null or valid, as the caller says.
        let options = unsafe { c_options::read(options) }?;
        let opened = options.open().map_err(|error| not_open(&error))?;
        // SAFETY: as above.
        unsafe { put(volume, ProgramHandle::open(opened)) }?;
        Ok(0)
    })
}

/// Returns the state of a volume.
///
/// # Safety
/// As `rblk.h` says.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn rblk_volume_status(
    volume: *mut VolumeHandle,
    status: *mut rblk_status,
) -> c_int {
    call(|| {
        // SAFETY: null, or a handle of `rblk_open`, as the caller says.
        let mut open = unsafe { ProgramHandle::wait(volume) }?;
        let volume = opened(&mut open)?;
        let now = rblk_status {
            size: 0,
            size_bytes: volume.size_bytes(),
            unflushed_writes: volume.unflushed_writes(),
            losses: volume.losses(),
            max_io: volume.max_io() as u64,
            block_size: volume.block_size(),
            state: number(volume.state()),
            read_only: u32::from(volume.is_read_only()),
            reserved: 0,
        };
        // SAFETY: null, or valid for the bytes that it says, as the caller says.
        unsafe { fill(status, now, |now, size| now.size = size) }?;
        Ok(0)
    })
}

/// Returns the next queue of a volume.
///
/// # Safety
/// As `rblk.h` says.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn rblk_queue_create(
    volume: *mut VolumeHandle,
    queue: *mut *mut QueueHandle,
) -> c_int {
    call(|| {
        // SAFETY: null, or a place for a handle, as the caller says.
        unsafe { put(queue, std::ptr::null_mut()) }?;
        // SAFETY: null, or a handle of `rblk_open`, as the caller says.
        let mut open = unsafe { ProgramHandle::wait(volume) }?;
        let next = opened(&mut open)?.queue().ok_or_else(|| {
            let words = "all queues of the volume are given out: open it with more `queues`";
            CallFailure::new(libc::ENOENT, words)
        })?;
        let driven = Driven::new(next)?;
        // SAFETY: as above.
        unsafe { put(queue, ProgramHandle::open(driven)) }?;
        Ok(0)
    })
}

/// Closes a volume.
///
/// # Safety
/// As `rblk.h` says.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn rblk_close(volume: *mut VolumeHandle) -> c_int {
    call(|| {
        // SAFETY: null, or a handle of `rblk_open`, as the caller says.
        let volume = unsafe { ProgramHandle::close(volume) }?;
        volume.close().map_err(|error| CallFailure::of(libc::ETIMEDOUT, &error))?;
        Ok(0)
    })
}
