//! [`CountingAllocator`]: the system's allocator, with a count of each thread's allocations.
//!
//! A program installs the allocator to count. Without it every count stays 0. [`are_counted`]
//! distinguishes that from a program that allocates nothing.
//!
//! ```
//! use rblk_rig::allocations::{self, CountingAllocator};
//!
//! #[global_allocator]
//! static ALLOCATOR: CountingAllocator = CountingAllocator;
//!
//! let before = allocations::of_this_thread();
//! let kept = std::hint::black_box(Box::new(1_u64));
//! assert_eq!(allocations::of_this_thread() - before, 1);
//! drop(kept);
//! assert_eq!(allocations::of_this_thread() - before, 1, "freeing is no allocation");
//! assert!(allocations::are_counted());
//! ```

#![allow(unsafe_code, reason = "an allocator cannot be written without")]

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

thread_local! {
    // Constant and without a destructor, so that the allocator itself may use it.
    static COUNT: Cell<u64> = const { Cell::new(0) };
}

/// The system's allocator, with a count per thread.
#[derive(Debug, Default)]
pub struct CountingAllocator;

fn count() {
    COUNT.with(|count| count.set(count.get() + 1));
}

// SAFETY: every call goes to the system's allocator unchanged, which keeps the contract of
// `GlobalAlloc`; counting touches a number that is the thread's own and neither allocates nor
// panics.
unsafe impl GlobalAlloc for CountingAllocator {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count();
        // SAFETY: the caller's promise.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        // SAFETY: the caller's promise.
        unsafe { System.dealloc(memory, layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        count();
        // SAFETY: the caller's promise.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn realloc(&self, memory: *mut u8, layout: Layout, new_size: usize) -> *mut u8 {
        count();
        // SAFETY: the caller's promise.
        unsafe { System.realloc(memory, layout, new_size) }
    }
}

/// Allocations and reallocations of this thread so far; 0 unless [`CountingAllocator`] is
/// installed.
#[must_use]
pub fn of_this_thread() -> u64 {
    COUNT.with(Cell::get)
}

/// Whether this program counts its allocations.
#[must_use]
pub fn are_counted() -> bool {
    let before = of_this_thread();
    drop(std::hint::black_box(Box::new(0_u64)));
    of_this_thread() > before
}
