//! [`times`]: how often a test does something: a few times in the gate, and more often with
//! `RBLK_LONG=N`.
//!
//! `RBLK_LONG=1` is `cargo xtask test --long`, whose rounds fit into 90 minutes. A larger number
//! multiplies them.

/// The number in `RBLK_LONG`, if the variable is there.
///
/// # Panics
/// The variable has something else than a number from 1 on.
#[must_use]
pub fn factor() -> Option<u64> {
    let text = std::env::var("RBLK_LONG").ok()?;
    let number = text.parse().ok().filter(|number| *number > 0);
    Some(number.unwrap_or_else(|| panic!("RBLK_LONG is a number from 1 on, and not {text:?}")))
}

/// How often to do something: `usual` times, or N times `long` with `RBLK_LONG=N`.
#[must_use]
pub fn times(usual: u64, long: u64) -> u64 {
    factor().map_or(usual, |factor| factor.saturating_mul(long))
}
