//! [`call`]: the common frame of every function. Nothing unwinds into C.

use std::panic::{AssertUnwindSafe, catch_unwind};

use crate::failure::CallFailure;

/// Runs the work of a function. Returns its result, or a negative errno.
///
/// A panic leaves its data behind the lock of its handle. The lock is poisoned then, so the data is
/// not used again, and the work may be called unwind-safe.
#[inline]
pub(crate) fn call<T: From<i32>>(work: impl FnOnce() -> Result<T, CallFailure>) -> T {
    let failure = match catch_unwind(AssertUnwindSafe(work)) {
        Ok(Ok(result)) => return result,
        Ok(Err(failure)) => failure,
        Err(_) => CallFailure::new(libc::EIO, "the library failed inside; stderr has the reason"),
    };
    failure.tell().into()
}

/// Writes a handle or a structure to the program's memory.
///
/// # Safety
/// `place` is null, or valid for writing.
pub(crate) unsafe fn put<T>(place: *mut T, value: T) -> Result<(), CallFailure> {
    if place.is_null() || !place.is_aligned() {
        return Err(CallFailure::misuse("a null pointer where the result goes"));
    }
    // SAFETY: not null, so valid for writing, as the caller says.
    unsafe { place.write(value) };
    Ok(())
}

/// Fills a structure. Its first word is its length in bytes as the program knows it: a program that
/// was built with an older header has a shorter one.
///
/// # Safety
/// `place` is null, or begins with a `usize` and is valid for that number of bytes.
pub(crate) unsafe fn fill<T>(
    place: *mut T,
    mut value: T,
    own: impl FnOnce(&mut T, usize),
) -> Result<(), CallFailure> {
    if place.is_null() || !place.is_aligned() {
        return Err(CallFailure::misuse("a null pointer where the result goes"));
    }
    // SAFETY: it begins with a `usize`.
    let size = unsafe { place.cast::<usize>().read() };
    if size < size_of::<usize>() {
        return Err(CallFailure::misuse("the field `size` of the structure is not set"));
    }
    let len = size.min(size_of::<T>());
    // So a program that is newer than the library learns the filled length.
    own(&mut value, len);
    // SAFETY: valid for `size` bytes, as the caller says, and `value` has as many.
    unsafe { place.cast::<u8>().copy_from_nonoverlapping((&raw const value).cast(), len) };
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_panic_is_an_error() {
        let result: i32 = call(|| panic!("deliberate"));
        assert_eq!(result, -libc::EIO);
        let result: i64 = call(|| Ok(7));
        assert_eq!(result, 7);
    }

    #[repr(C)]
    #[derive(Clone, Copy, PartialEq, Eq, Debug)]
    struct Three {
        size: usize,
        first: u64,
        second: u64,
    }

    #[test]
    fn a_shorter_structure_is_filled_as_far_as_it_goes() {
        let given = |size| {
            let mut place = Three { size, first: 1, second: 2 };
            let value = Three { size: 0, first: 8, second: 9 };
            // SAFETY: valid for more bytes than any `size` in this test.
            let filled = unsafe { fill(&raw mut place, value, |value, size| value.size = size) };
            filled.map(|()| place).map_err(|failure| failure.tell())
        };
        assert_eq!(given(24), Ok(Three { size: 24, first: 8, second: 9 }));
        assert_eq!(given(16), Ok(Three { size: 16, first: 8, second: 2 }));
        assert_eq!(given(4096), Ok(Three { size: 24, first: 8, second: 9 }), "what it filled");
        assert_eq!(given(0), Err(-libc::EINVAL));
        // SAFETY: null.
        assert!(unsafe { fill(std::ptr::null_mut::<u64>(), 1, |_, _| ()) }.is_err());
    }
}
