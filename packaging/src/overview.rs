//! [`page`]: section 7, `rblk(7)`, written by hand in `man/rblk.7`. The version and the exit codes
//! are those of the programs.

use rblk_config::Exit;
use roff::{Roff, bold, roman};

use crate::page::{MANUAL, source};

/// The text. `@...@` stands for what follows from the programs.
const TEXT: &str = include_str!("../man/rblk.7");

/// The page.
pub(crate) fn page() -> String {
    let mut codes = Roff::new();
    for exit in Exit::ALL {
        codes.control("TP", ["4"]);
        codes.text([bold(exit.code().to_string())]);
        codes.text([roman(exit.meaning())]);
    }
    let text = TEXT.replace("@SOURCE@", &source()).replace("@MANUAL@", MANUAL);
    text.replace("@EXIT@\n", codes.to_roff().trim_start())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_is_left_to_fill_in() {
        let text = page();
        assert!(text.contains("\\fB12\\fR") && text.starts_with(".TH rblk 7"), "{text}");
        assert!(!text.contains("@EXIT@") && !text.contains("@SOURCE@"), "{text}");
    }
}
