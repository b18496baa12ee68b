//! The target [`rblk_fuzz::guest_note`] under libFuzzer.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    let _ = rblk_fuzz::guest_note::run(data);
});
