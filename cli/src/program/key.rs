//! The command `key` of both programs: makes and shows the key by which an end proves its identity.

use std::path::Path;

use rblk_config::Exit;
use rblk_config::key_file::{self, Side};
use rblk_operate::Output;
use rblk_protocol::auth::PublicKey;
use serde::Serialize;

/// A key, in JSON.
#[derive(Serialize)]
struct Shown<'s> {
    public_key: String,
    file: &'s Path,
}

/// Makes a key. Only the public key goes to the standard output, so that a script can take it from
/// there. `next` names the steps that follow.
pub(crate) fn make(file: &Path, next: &str, output: Output) -> anyhow::Result<Exit> {
    let key = key_file::create(file)?;
    print(file, key, output)?;
    output.aside(format_args!("made {}; keep a copy of it in a safe place", file.display()));
    output.aside(next);
    Ok(Exit::Ok)
}

/// Shows the public key of a file.
pub(crate) fn show(file: &Path, side: Side, output: Output) -> anyhow::Result<Exit> {
    print(file, key_file::read(file, side)?.public(), output)?;
    Ok(Exit::Ok)
}

fn print(file: &Path, key: PublicKey, output: Output) -> anyhow::Result<()> {
    let shown = Shown { public_key: key.to_string(), file };
    Ok(output.answer(&shown, || key.to_string())?)
}
