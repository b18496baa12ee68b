//! The target [`rblk_fuzz::capsule`] under libFuzzer.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    let _ = rblk_fuzz::capsule::run(data);
});
