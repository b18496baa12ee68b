//! Conversions between integer widths: [`wide`] loses nothing, [`narrow`] states a bound.
//!
//! The standard library offers no `usize: From<u32>`, because it also serves machines of 16 bits.
//! rblk runs on 64-bit Linux only, and says so here, once.

use std::fmt::{Debug, Display};

const _: () = assert!(usize::BITS == 64, "rblk runs on 64-bit machines only");

/// Widens an unsigned integer to `usize`, for an index or a length in memory. Loses nothing.
#[inline(always)]
#[must_use]
pub fn wide(value: impl Into<u64>) -> usize {
    #[allow(clippy::cast_possible_truncation)] // `usize` has 64 bits: asserted above
    {
        value.into() as usize
    }
}

/// Widens a `usize` to `u64`, for the wire and for offsets in volumes. Loses nothing.
#[inline(always)]
#[must_use]
pub const fn wide64(value: usize) -> u64 {
    value as u64
}

/// Narrows an unsigned integer that the caller knows to fit.
///
/// A value that does not fit is a bug. It panics in debug builds. In release builds it becomes the
/// largest value of the narrow type, which every later check of a range refuses. Use `try_from` for
/// a value that a peer, a file or a user may choose.
#[inline(always)]
#[must_use]
#[cfg_attr(debug_assertions, track_caller)]
pub fn narrow<T: Bounded + TryFrom<F>, F: Copy + Display>(value: F) -> T {
    match T::try_from(value) {
        Ok(value) => value,
        Err(_) if cfg!(debug_assertions) => panic!("{value} is more than {:?}", T::MAX),
        Err(_) => T::MAX,
    }
}

/// Narrows a length that is known at compile time, for a constant.
///
/// # Panics
/// The value does not fit. In a constant the compiler reports it.
#[must_use]
pub const fn const_u32(value: usize) -> u32 {
    assert!(value <= u32::MAX as usize, "the constant does not fit 32 bits");
    #[allow(clippy::cast_possible_truncation)] // asserted above
    {
        value as u32
    }
}

/// An unsigned integer with its largest value, for [`narrow`].
pub trait Bounded: Debug {
    /// The largest value.
    const MAX: Self;
}

impl Bounded for u8 {
    const MAX: Self = Self::MAX;
}

impl Bounded for u16 {
    const MAX: Self = Self::MAX;
}

impl Bounded for u32 {
    const MAX: Self = Self::MAX;
}

impl Bounded for i32 {
    const MAX: Self = Self::MAX;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn widening_loses_nothing() {
        assert_eq!(wide(u16::MAX), 0xffff);
        assert_eq!(wide(u32::MAX), 0xffff_ffff);
        assert_eq!(wide64(wide(u64::MAX)), u64::MAX);
    }

    #[test]
    fn narrowing_keeps_what_fits() {
        assert_eq!(narrow::<u8, _>(255usize), 255);
        assert_eq!(narrow::<u16, _>(0xffffu64), 0xffff);
        assert_eq!(narrow::<u32, _>(7usize), 7);
    }

    #[test]
    #[cfg(debug_assertions)]
    #[should_panic(expected = "256 is more than 255")]
    fn a_bound_that_does_not_hold_is_a_bug() {
        let _ = narrow::<u8, _>(256usize);
    }
}
