//! The target [`rblk_fuzz::target_config`] under libFuzzer.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    let _ = rblk_fuzz::target_config::run(data);
});
