//! The parts that pages have in common.

use roff::{Roff, bold, roman};

/// The name of the collection, at the top of a page.
pub(crate) const MANUAL: &str = "rblk";

/// A page with its first line and its name.
pub(crate) fn page(name: &str, section: &str, about: &str) -> Roff {
    let mut page = Roff::new();
    let source = source();
    page.control("TH", [name, section, "", source.as_str(), MANUAL]);
    page.control("SH", ["NAME"]);
    page.text([roman(format!("{name} - {about}"))]);
    page
}

/// The program and its version, at the bottom of a page.
pub(crate) fn source() -> String {
    format!("rblk {}", env!("CARGO_PKG_VERSION"))
}

/// Paragraphs, with an empty line between two.
pub(crate) fn paragraphs(page: &mut Roff, all: &[String]) {
    for (position, paragraph) in all.iter().enumerate() {
        if position > 0 {
            page.control("PP", []);
        }
        page.text([roman(paragraph.as_str())]);
    }
}

/// A text whose lines stay as they are.
pub(crate) fn verbatim(page: &mut Roff, text: &str) {
    page.control("nf", []);
    for line in text.lines() {
        // An empty line in a page would end what surrounds it.
        page.text([roman(if line.is_empty() { "\u{a0}" } else { line })]);
    }
    page.control("fi", []);
}

/// The section of related pages: each a name and a section.
pub(crate) fn see_also(page: &mut Roff, pages: &[(String, &str)]) {
    page.control("SH", ["SEE ALSO"]);
    let last = pages.len().saturating_sub(1);
    for (position, (name, section)) in pages.iter().enumerate() {
        let end = if position == last { "" } else { "," };
        page.text([bold(name.as_str()), roman(format!("({section}){end}"))]);
    }
}
