//! The target [`rblk_fuzz::mount_config`] under libFuzzer.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    let _ = rblk_fuzz::mount_config::run(data);
});
