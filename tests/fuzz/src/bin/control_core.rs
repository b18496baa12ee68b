//! The target [`rblk_fuzz::control_core`] under libFuzzer.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    let _ = rblk_fuzz::control_core::run(data);
});
