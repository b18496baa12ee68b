//! Takes corpora out of their archives, and makes the archive of a corpus:
//!
//! ```text
//! corpus unpack DIR        all corpora, into DIR/NAME
//! corpus pack NAME DIR     the corpus NAME, from the files in DIR
//! ```

use std::path::Path;

use rblk_fuzz::{ALL, corpus};

fn main() -> std::io::Result<()> {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    match words[..] {
        ["unpack", directory] => {
            for target in ALL {
                corpus::unpack(target.name, &Path::new(directory).join(target.name))?;
            }
        }
        ["pack", name, directory] if ALL.iter().any(|target| target.name == name) => {
            let count = corpus::pack(name, Path::new(directory))?;
            println!("{}: {count} inputs", corpus::path(name).display());
        }
        _ => {
            eprintln!("corpus unpack DIR, or corpus pack NAME DIR, where NAME is a target's");
            std::process::exit(2);
        }
    }
    Ok(())
}
