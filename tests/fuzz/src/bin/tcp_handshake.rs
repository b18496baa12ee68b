//! The target [`rblk_fuzz::tcp_handshake`] under libFuzzer.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    let _ = rblk_fuzz::tcp_handshake::run(data);
});
