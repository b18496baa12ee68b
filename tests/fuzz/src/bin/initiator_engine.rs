//! The target [`rblk_fuzz::initiator_engine`] under libFuzzer.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    let _ = rblk_fuzz::initiator_engine::run(data);
});
