//! The functions that submit requests.

use std::ffi::{c_int, c_void};

use rblk_client::Request;

use crate::failure::CallFailure;
use crate::queue::{QueueHandle, with};

/// A write that is durable when it is completed: `RBLK_DURABLE`.
const DURABLE: u32 = 1;
/// Keep the space of a zeroed range allocated: `RBLK_KEEP_ALLOCATED`.
const KEEP_ALLOCATED: u32 = 1;

fn check_flags(flags: u32, known: u32) -> Result<(), CallFailure> {
    match flags & !known {
        0 => Ok(()),
        _ => Err(CallFailure::new(
            libc::ENOTSUP,
            "a flag that this version of the library does not know",
        )),
    }
}

/// Reads to a buffer.
///
/// # Safety
/// As `rblk.h` says.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn rblk_read(
    queue: *mut QueueHandle,
    buffer: *mut c_void,
    offset: u64,
    len: usize,
    user_data: u64,
) -> c_int {
    // SAFETY: null, or a handle of `rblk_queue_create`, as the caller says.
    unsafe {
        with(queue, |driven| {
            let request = |buffer| Request::read(buffer, offset, len).with_token(user_data);
            driven.submit_data(buffer, request)?;
            Ok(0)
        })
    }
}

/// Writes from a buffer.
///
/// # Safety
/// As `rblk.h` says.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn rblk_write(
    queue: *mut QueueHandle,
    buffer: *const c_void,
    offset: u64,
    len: usize,
    flags: u32,
    user_data: u64,
) -> c_int {
    // SAFETY: null, or a handle of `rblk_queue_create`, as the caller says.
    unsafe {
        with(queue, |driven| {
            check_flags(flags, DURABLE)?;
            driven.submit_data(buffer, |buffer| {
                let request = Request::write(buffer, offset, len).with_token(user_data);
                if flags & DURABLE != 0 { request.durable() } else { request }
            })?;
            Ok(0)
        })
    }
}

/// Makes completed writes durable.
///
/// # Safety
/// As `rblk.h` says.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn rblk_flush(queue: *mut QueueHandle, user_data: u64) -> c_int {
    // SAFETY: null, or a handle of `rblk_queue_create`, as the caller says.
    unsafe {
        with(queue, |driven| {
            driven.submit(Request::flush().with_token(user_data))?;
            Ok(0)
        })
    }
}

/// Discards a range: its data is not needed any more.
///
/// # Safety
/// As `rblk.h` says.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn rblk_discard(
    queue: *mut QueueHandle,
    offset: u64,
    len: u64,
    user_data: u64,
) -> c_int {
    // SAFETY: null, or a handle of `rblk_queue_create`, as the caller says.
    unsafe {
        with(queue, |driven| {
            driven.submit(Request::discard(offset, len).with_token(user_data))?;
            Ok(0)
        })
    }
}

/// Zeroes a range.
///
/// # Safety
/// As `rblk.h` says.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn rblk_write_zeroes(
    queue: *mut QueueHandle,
    offset: u64,
    len: u64,
    flags: u32,
    user_data: u64,
) -> c_int {
    // SAFETY: null, or a handle of `rblk_queue_create`, as the caller says.
    unsafe {
        with(queue, |driven| {
            check_flags(flags, KEEP_ALLOCATED)?;
            let request = Request::write_zeroes(offset, len).with_token(user_data);
            let keep = flags & KEEP_ALLOCATED != 0;
            driven.submit(if keep { request.keep_allocated() } else { request })?;
            Ok(0)
        })
    }
}
