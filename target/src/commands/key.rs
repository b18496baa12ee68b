//! `rblk-target key`: makes and shows the key by which a target proves its identity.

use crate::commands::args::{KeyArgs, KeyCommand};
use rblk_config::Exit;
use rblk_config::key_file::{self, Side};
use rblk_operate::Output;
use rblk_protocol::auth::PublicKey;
use serde::Serialize;

/// A key, in JSON.
#[derive(Serialize)]
struct Shown<'s> {
    public_key: String,
    file: &'s std::path::Path,
}

/// Carries out a command. Only the public key goes to the standard output, so that a script can
/// take it from there.
pub(crate) fn key(command: &KeyCommand, output: Output) -> anyhow::Result<Exit> {
    match command {
        KeyCommand::New(args) => {
            let key = key_file::create(&args.file)?;
            print(args, key, output)?;
            output.aside(format_args!(
                "made {}; keep a copy of it in a safe place",
                args.file.display()
            ));
            output.aside(
                "The key above is public. Give it to each host: `rblk-initiator mount ADDRESS VOLUME --target-key KEY`,\n\
                 or target_keys = [\"KEY\"] in the file of the mount. Then let each host in, by the key that\n\
                 `rblk-initiator key new` prints there: `rblk-target host add NAME --key KEY --volume VOLUME:rw`",
            );
        }
        KeyCommand::Show(args) => {
            print(args, key_file::read(&args.file, Side::Target)?.public(), output)?;
        }
    }
    Ok(Exit::Ok)
}

fn print(args: &KeyArgs, key: PublicKey, output: Output) -> anyhow::Result<()> {
    let shown = Shown { public_key: key.to_string(), file: &args.file };
    Ok(output.answer(&shown, || key.to_string())?)
}
