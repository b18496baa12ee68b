//! [`ProgramHandle`]: a program's handle of a volume or a queue.
//!
//! A handle is memory that is never freed: [`ProgramHandle::open`] reuses closed ones. So a program
//! that uses a handle after its close, or closes it twice, gets an error, or meets the handle that
//! was opened later, as with file descriptors; the memory never holds anything else.

use std::sync::{Mutex, MutexGuard, PoisonError, TryLockError};

use crate::failure::CallFailure;

/// A volume or a queue.
pub(crate) struct ProgramHandle<T: 'static> {
    value: Mutex<Option<T>>,
}

/// The content of a handle.
pub(crate) trait HandleContent: Sized {
    /// The closed handles.
    fn closed() -> &'static Mutex<Vec<&'static ProgramHandle<Self>>>;
}

/// The locked content of a handle.
pub(crate) type Open<T> = MutexGuard<'static, Option<T>>;

const NULL: &str = "a null pointer where a handle is needed";
const CLOSED: &str = "the handle is closed";
const BROKEN: &str = "a call with this handle failed inside the library: close it";

impl<T: HandleContent> ProgramHandle<T> {
    /// Makes a handle for a value.
    pub(crate) fn open(value: T) -> *mut Self {
        let used = T::closed().lock().unwrap_or_else(PoisonError::into_inner).pop();
        let handle = used.unwrap_or_else(|| Box::leak(Box::new(Self { value: Mutex::new(None) })));
        *handle.value.lock().unwrap_or_else(PoisonError::into_inner) = Some(value);
        std::ptr::from_ref(handle).cast_mut()
    }

    /// The handle behind a pointer.
    ///
    /// # Safety
    /// The pointer is null, or is from [`Self::open`].
    unsafe fn at(pointer: *mut Self) -> Result<&'static Self, CallFailure> {
        if pointer.is_null() || !pointer.is_aligned() {
            return Err(CallFailure::misuse(NULL));
        }
        // SAFETY: it is from `open`, so it lives as long as the process, and is shared only.
        Ok(unsafe { &*pointer })
    }

    /// Locks a handle that any thread may use. Waits for other threads.
    ///
    /// # Safety
    /// The pointer is null, or is from [`Self::open`].
    pub(crate) unsafe fn wait(pointer: *mut Self) -> Result<Open<T>, CallFailure> {
        // SAFETY: as the caller says.
        let handle = unsafe { Self::at(pointer) }?;
        handle.value.lock().map_err(|_| CallFailure::new(libc::EIO, BROKEN))
    }

    /// Locks a handle that one thread may use at a time. Does not wait.
    ///
    /// # Safety
    /// The pointer is null, or is from [`Self::open`].
    #[inline]
    pub(crate) unsafe fn enter(pointer: *mut Self) -> Result<Open<T>, CallFailure> {
        // SAFETY: as the caller says.
        let handle = unsafe { Self::at(pointer) }?;
        handle.value.try_lock().map_err(|error| match error {
            TryLockError::WouldBlock => CallFailure::new(
                libc::EBUSY,
                "another thread is using the queue: each thread needs a queue of its own",
            ),
            TryLockError::Poisoned(_) => CallFailure::new(libc::EIO, BROKEN),
        })
    }

    /// Takes the content of a handle. The handle is closed then.
    ///
    /// # Safety
    /// The pointer is null, or is from [`Self::open`].
    pub(crate) unsafe fn close(pointer: *mut Self) -> Result<T, CallFailure> {
        // SAFETY: as the caller says.
        let handle = unsafe { Self::at(pointer) }?;
        let value = match handle.value.try_lock() {
            Ok(mut value) => value.take(),
            Err(TryLockError::Poisoned(broken)) => broken.into_inner().take(),
            Err(TryLockError::WouldBlock) => {
                return Err(CallFailure::new(libc::EBUSY, "another thread is using the handle"));
            }
        };
        let value = value.ok_or_else(closed)?;
        handle.value.clear_poison();
        T::closed().lock().unwrap_or_else(PoisonError::into_inner).push(handle);
        Ok(value)
    }
}

/// The content of an open handle.
#[inline]
pub(crate) fn opened<T>(open: &mut Open<T>) -> Result<&mut T, CallFailure> {
    open.as_mut().ok_or_else(closed)
}

fn closed() -> CallFailure {
    CallFailure::new(libc::EBADF, CLOSED)
}

#[cfg(test)]
mod tests {
    use super::*;

    impl HandleContent for u32 {
        fn closed() -> &'static Mutex<Vec<&'static ProgramHandle<Self>>> {
            static CLOSED: Mutex<Vec<&ProgramHandle<u32>>> = Mutex::new(Vec::new());
            &CLOSED
        }
    }

    fn enter(handle: *mut ProgramHandle<u32>) -> Result<u32, i32> {
        // SAFETY: it is from `open`, or null.
        let open = unsafe { ProgramHandle::enter(handle) };
        let result = open.and_then(|mut open| opened(&mut open).copied());
        result.map_err(|failure| failure.tell())
    }

    fn close(handle: *mut ProgramHandle<u32>) -> Result<u32, i32> {
        // SAFETY: it is from `open`, or null.
        unsafe { ProgramHandle::close(handle) }.map_err(|failure| failure.tell())
    }

    // One test: the handles of a type are shared by all threads.
    #[test]
    fn every_use_of_a_handle_is_defined() {
        assert_eq!(enter(std::ptr::null_mut()), Err(-libc::EINVAL));
        assert_eq!(close(std::ptr::null_mut()), Err(-libc::EINVAL));
        let (one, two) = (ProgramHandle::open(1), ProgramHandle::open(2));
        assert_eq!((enter(one), enter(two)), (Ok(1), Ok(2)));

        // SAFETY: it is from `open`.
        let inside = unsafe { ProgramHandle::enter(one) }.unwrap();
        assert_eq!((enter(one), close(one)), (Err(-libc::EBUSY), Err(-libc::EBUSY)));
        drop(inside);

        assert_eq!(close(one), Ok(1));
        assert_eq!((enter(one), close(one)), (Err(-libc::EBADF), Err(-libc::EBADF)));
        assert!(std::ptr::eq(ProgramHandle::open(3), one), "its memory is used again");
        assert_eq!((enter(one), enter(two)), (Ok(3), Ok(2)));

        // A handle after a panic is not used again, but can be closed.
        let address = one.addr();
        let result = std::thread::spawn(move || {
            // SAFETY: the address of a handle.
            let _inside = unsafe { ProgramHandle::enter(address as *mut ProgramHandle<u32>) };
            panic!("deliberate");
        });
        assert!(result.join().is_err());
        assert_eq!(enter(one), Err(-libc::EIO));
        assert_eq!(close(one), Ok(3));
        assert_eq!(enter(ProgramHandle::open(4)), Ok(4));
    }
}
