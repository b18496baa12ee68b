//! [`Quoted`]: a word of a command as a shell takes it, for commands that people copy. Pure.

use std::fmt;

/// A word of a command for a shell: as it is where no character means something there, else in
/// single quotes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Quoted<'a>(pub &'a str);

impl fmt::Display for Quoted<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let is_plain = |c: char| {
            c.is_ascii_alphanumeric() || matches!(c, '/' | '.' | '_' | '-' | ':' | ',' | '+')
        };
        // A word with a dash in front would be an option.
        if !self.0.is_empty() && !self.0.starts_with('-') && self.0.chars().all(is_plain) {
            return f.write_str(self.0);
        }
        let front = if self.0.starts_with('-') { "./" } else { "" };
        write!(f, "'{front}{}'", self.0.replace('\'', "'\\''"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_shell_takes_each_word_as_one() {
        for word in
            ["/mnt/data", "/a b", "it's", "", "$(id)", "`id`", "a\nb", "a;b", "\\", "é", "~"]
        {
            let command = format!("printf %s {}", Quoted(word));
            let said = std::process::Command::new("sh").arg("-c").arg(command).output().unwrap();
            assert_eq!(String::from_utf8(said.stdout).unwrap(), word);
        }
        assert_eq!(Quoted("/mnt/data-1.x").to_string(), "/mnt/data-1.x");
        assert_eq!(Quoted("/a b").to_string(), "'/a b'");
        assert_eq!(Quoted("-f").to_string(), "'./-f'", "a path, not an option");
    }
}
