//! The live page: one document without outside resources, and the policy that lets a browser run
//! exactly this style and this script.

use hyper::body::Bytes;
use sha2::{Digest, Sha256};

const DOCUMENT: &str = include_str!("page/page.html");
const STYLE: &str = include_str!("page/page.css");
/// One script, of one file for each subject: all of them share one scope.
const SCRIPT: &str = concat!(
    include_str!("page/figures.js"),
    include_str!("page/timeline.js"),
    include_str!("page/head.js"),
    include_str!("page/tables.js"),
    include_str!("page/charts.js"),
    include_str!("page/events.js"),
    include_str!("page/page.js"),
);

/// The document and its policy, as they are sent.
#[derive(Clone, Debug)]
pub struct Page {
    /// The document.
    pub html: Bytes,
    /// The value of `Content-Security-Policy`: allows only this style, this script, and requests to
    /// the target itself.
    pub policy: String,
}

impl Page {
    /// Puts the document together.
    #[must_use]
    pub fn new() -> Self {
        let html = DOCUMENT.replace("/*STYLE*/", STYLE).replace("/*SCRIPT*/", SCRIPT);
        let policy = format!(
            "default-src 'none'; style-src 'sha256-{}'; script-src 'sha256-{}'; connect-src 'self'; \
             base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
            hash(STYLE),
            hash(SCRIPT)
        );
        Self { html: Bytes::from(html), policy }
    }
}

impl Default for Page {
    fn default() -> Self {
        Self::new()
    }
}

fn hash(text: &str) -> String {
    base64(&Sha256::digest(text.as_bytes()))
}

/// Base64 with padding (RFC 4648, section 4).
fn base64(bytes: &[u8]) -> String {
    const DIGITS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let mut text = String::new();
    for chunk in bytes.chunks(3) {
        let byte = |at: usize| u32::from(chunk.get(at).copied().unwrap_or(0));
        let bits = byte(0) << 16 | byte(1) << 8 | byte(2);
        for digit in 0..4 {
            let index = (bits >> (18 - 6 * digit)) & 63;
            let is_padding = digit > u32::try_from(chunk.len()).unwrap_or(3);
            text.push(if is_padding { '=' } else { char::from(DIGITS[index as usize]) });
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn base64_of_the_rfc() {
        for (bytes, text) in [
            ("", ""),
            ("f", "Zg=="),
            ("fo", "Zm8="),
            ("foo", "Zm9v"),
            ("foob", "Zm9vYg=="),
            ("fooba", "Zm9vYmE="),
            ("foobar", "Zm9vYmFy"),
        ] {
            assert_eq!(base64(bytes.as_bytes()), text);
        }
    }

    /// A browser would leave out in silence anything that the policy forbids; text that breaks out
    /// of the document would change it.
    #[test]
    fn the_page_has_one_style_one_script_and_nothing_from_elsewhere() {
        let page = Page::new();
        let html = std::str::from_utf8(&page.html).unwrap();
        assert_eq!(html.matches("<style>").count(), 1);
        assert_eq!(html.matches("<script>").count(), 1);
        assert_eq!(html.matches("</script").count(), 1);
        for outside in ["http://", "https://", "src=", "@import", "url(", "style=\"", "onclick"] {
            assert!(!html.contains(outside), "{outside}");
        }
        for unsafe_sink in ["innerHTML", "outerHTML", "insertAdjacent", "document.write", "eval("] {
            assert!(!SCRIPT.contains(unsafe_sink), "{unsafe_sink}");
        }
        assert!(html.contains(&format!("<script>{SCRIPT}</script>")), "the hash is of all of it");
        assert!(html.contains(&format!("<style>{STYLE}</style>")));
        assert!(page.policy.starts_with("default-src 'none'; style-src 'sha256-"));
        assert!(!page.policy.contains("unsafe"));
    }
}
