//! The note that a guest's program leaves to the next one.

use rblk_initiator::mount::note::guest::fuzzing::accepts;

/// The bytes are the file.
pub fn run(data: &[u8]) -> bool {
    accepts(data)
}

/// Notes as programs write them: in doubt, with a loss, and with nothing to tell.
#[must_use]
pub fn seeds() -> Vec<Vec<u8>> {
    let note = |unflushed, loss, on_loss, rings: &[u16]| {
        let hex = "0102030405060708090a0b0c0d0e0f10";
        let note = serde_json::json!({
            "form": 1, "boot": "52d1f1f4-3b3c-4b5a-9d3e-111111111111", "volume": "v", "target": "t",
            "uuid": hex, "instance": hex, "verifier": hex, "generation": 7,
            "maybe_unflushed": unflushed, "loss_untold": loss, "on_loss": on_loss,
            "rings_in_doubt": rings
        });
        note.to_string().into_bytes()
    };
    vec![
        note(true, false, "until-remount", &[0, 1]),
        note(true, true, "once", &[3]),
        note(false, false, "until-remount", &[]),
    ]
}
