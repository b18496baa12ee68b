//! The target [`rblk_fuzz::vhost_front_end`] under libFuzzer.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    let _ = rblk_fuzz::vhost_front_end::run(data);
});
