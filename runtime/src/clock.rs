//! [`synchronised`]: whether something keeps the clock of this host right.

/// True if the kernel counts the clock as synchronised (NTP, PTP). `None` if the call fails.
#[must_use]
pub fn synchronised() -> Option<bool> {
    // SAFETY: a timex is integers only, so zeros are a value of it.
    let mut timex: libc::timex = unsafe { std::mem::zeroed() };
    // SAFETY: the kernel fills the timex during the call; no mode is set, so nothing is changed.
    let state = unsafe { libc::adjtimex(&raw mut timex) };
    (state >= 0).then_some(state != libc::TIME_ERROR && timex.status & libc::STA_UNSYNC == 0)
}

#[cfg(test)]
mod tests {
    #[test]
    fn the_kernel_answers_and_is_not_changed() {
        // Some sandboxes refuse the call; where it is answered, the answer stays.
        assert_eq!(super::synchronised().is_some(), super::synchronised().is_some());
    }
}
