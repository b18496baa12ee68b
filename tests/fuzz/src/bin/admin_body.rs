//! The target [`rblk_fuzz::admin_body`] under libFuzzer.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    let _ = rblk_fuzz::admin_body::run(data);
});
