//! [`all`]: completions for bash, zsh and fish.
//!
//! Each is a few lines that run the program itself with the words so far (`clap_complete`'s dynamic
//! engine). So one piece of Rust, `shell_answers.rs` of `rblk-cli`, knows the names of
//! mounts, volumes, hosts and sessions for every shell. Scripts without it would need a function in
//! the language of each shell, put into generated text. The lines and the program have to be of one
//! version of `clap_complete`: they are in one package.

use std::io;

use clap_complete::env::{Bash, EnvCompleter, Fish, Zsh};
use rblk_cli::program::shell_answers::COMPLETION_VARIABLE;

/// The programs that people run.
const PROGRAMS: [&str; 2] = ["rblk-target", "rblk-initiator"];

/// Every file: its name, and its text.
pub(crate) fn all() -> io::Result<Vec<(String, String)>> {
    let mut files = Vec::new();
    for program in PROGRAMS {
        let shells: [(&dyn EnvCompleter, String); 3] = [
            (&Bash, format!("{program}.bash")),
            (&Zsh, format!("_{program}")),
            (&Fish, format!("{program}.fish")),
        ];
        for (shell, file) in shells {
            let mut bytes = Vec::new();
            shell.write_registration(COMPLETION_VARIABLE, program, program, program, &mut bytes)?;
            if shell.name() == "zsh" {
                bytes.extend(at_once(program).into_bytes());
            }
            files.push((file, String::from_utf8(bytes).map_err(io::Error::other)?));
        }
    }
    Ok(files)
}

/// zsh loads the file at the first completion, as a function of the name of the file. The lines of
/// `clap_complete` only say what answers the next one.
fn at_once(program: &str) -> String {
    let function = format!("_clap_dynamic_completer_{}", program.replace('-', "_"));
    format!("\n\nif [[ $funcstack[1] == _{program} ]]; then\n    {function} \"$@\"\nfi\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_shell_asks_the_program() {
        let files = all().unwrap();
        assert_eq!(files.len(), 6);
        for (name, text) in files {
            let program = if name.contains("target") { "rblk-target" } else { "rblk-initiator" };
            assert!(text.contains(COMPLETION_VARIABLE) && text.contains(program), "{name}: {text}");
        }
    }
}
