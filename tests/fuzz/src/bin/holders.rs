//! The target [`rblk_fuzz::holders`] under libFuzzer.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    let _ = rblk_fuzz::holders::run(data);
});
