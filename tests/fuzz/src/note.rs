//! The note that a mount leaves to the next process.

use rblk_config::MountConfig;
use rblk_initiator::mount::note::Note;

/// The bytes are the file.
pub fn run(data: &[u8]) -> bool {
    Note::accepts(data)
}

/// A note as a mount writes it.
#[must_use]
pub fn seeds() -> Vec<Vec<u8>> {
    let config = serde_json::to_value(MountConfig::new("tcp://store", "vol0")).expect("a value");
    let hex = "0102030405060708090a0b0c0d0e0f10";
    let note = serde_json::json!({
        "form": 2, "name": "m", "pid": 77, "device_id": 4, "token": "7262000000000001",
        "config": config, "host": hex, "session": { "id": hex, "epoch": 3 }, "instance": hex,
        "target_name": "store1",
        "volume": {
            "blocks": 100, "block_size": 512, "flags": 6, "discard_granularity": 4096,
            "uuid": hex, "verifier": hex, "generation": 7
        },
        "wish": { "depth": 128, "io_max": 262_144, "in_capsule": 4096, "features": 5 },
        "queues": 2, "maybe_unflushed": true, "loss_untold": true, "fenced": null,
        "recovered": 3, "address": "tcp://store:7721", "rdma_device": "", "transport": "tcp"
    });
    vec![note.to_string().into_bytes()]
}
