//! The target [`rblk_fuzz::hello`] under libFuzzer.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    let _ = rblk_fuzz::hello::run(data);
});
