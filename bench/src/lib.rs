//! Measures rblk.
