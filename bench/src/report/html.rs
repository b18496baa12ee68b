//! [`Html`]: a page whose tags are closed by construction.

use super::svg::escape;

/// Text of a page that is being written.
#[derive(Clone, Debug, Default)]
pub struct Html {
    text: String,
}

impl Html {
    /// An element with its attributes and what is inside.
    pub fn element(
        &mut self,
        tag: &str,
        attributes: &[(&str, &str)],
        inside: impl FnOnce(&mut Self),
    ) {
        self.open(tag, attributes);
        inside(self);
        self.text += &format!("</{tag}>\n");
    }

    /// An element with a text inside.
    pub fn text_in(&mut self, tag: &str, attributes: &[(&str, &str)], text: &str) {
        self.open(tag, attributes);
        self.text += &escape(text);
        self.text += &format!("</{tag}>\n");
    }

    /// Text.
    pub fn text(&mut self, text: &str) {
        self.text += &escape(text);
    }

    /// What is written as it is: the caller made sure that it is a whole piece of a page.
    pub fn raw(&mut self, text: &str) {
        self.text += text;
    }

    fn open(&mut self, tag: &str, attributes: &[(&str, &str)]) {
        self.text += &format!("<{tag}");
        for (name, value) in attributes {
            self.text += &format!(" {name}=\"{}\"", escape(value));
        }
        self.text.push('>');
    }

    /// A table in a box that scrolls; columns whose names begin with `#` hold numbers.
    pub fn table(&mut self, columns: &[&str], rows: impl FnOnce(&mut Self)) {
        self.element("div", &[("class", "scroll")], |html| {
            html.element("table", &[], |html| {
                html.element("thead", &[], |html| {
                    html.element("tr", &[], |html| {
                        for column in columns {
                            match column.strip_prefix('#') {
                                Some(name) => html.text_in("th", &[("class", "number")], name),
                                None => html.text_in("th", &[], column),
                            }
                        }
                    });
                });
                html.element("tbody", &[], rows);
            });
        });
    }

    /// A row of a table: plain cells, and with `#` before them numbers.
    pub fn row(&mut self, cells: &[String]) {
        self.element("tr", &[], |html| {
            for cell in cells {
                match cell.strip_prefix('#') {
                    Some(number) => html.text_in("td", &[("class", "number")], number),
                    None => html.text_in("td", &[], cell),
                }
            }
        });
    }

    /// What has been written, for a page around it.
    #[must_use]
    pub fn whole(self) -> String {
        self.text
    }

    /// The whole page.
    #[must_use]
    pub fn page(self, title: &str, style: &str) -> String {
        format!(
            "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n\
             <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n\
             <title>{}</title>\n<style>\n{style}</style>\n</head>\n<body>\n{}</body>\n</html>\n",
            escape(title),
            self.text
        )
    }
}

/// Checks that every tag of a page is closed, in order; gives the first that is not.
#[cfg(test)]
pub(super) fn unbalanced(page: &str) -> Option<String> {
    const VOID: [&str; 3] = ["meta", "!doctype", "br"];
    let mut open: Vec<&str> = Vec::new();
    let mut rest = page;
    while let Some(at) = rest.find('<') {
        rest = &rest[at + 1..];
        // A style has no tags, and a quoted attribute may hold anything but a quote.
        let mut quoted = false;
        let end = rest.find(|c| {
            quoted ^= c == '"';
            c == '>' && !quoted
        })?;
        let tag = &rest[..end];
        rest = &rest[end + 1..];
        if tag.ends_with('/') {
            continue;
        }
        if let Some(name) = tag.strip_prefix('/') {
            match open.pop() {
                Some(opened) if opened == name => {}
                other => return Some(format!("</{name}> after <{other:?}>")),
            }
            continue;
        }
        let name = tag.split_whitespace().next().unwrap_or("");
        if !VOID.contains(&name) {
            open.push(name);
        }
    }
    open.pop().map(str::to_owned)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_opened_is_closed() {
        let mut html = Html::default();
        html.element("main", &[("class", "a\"b")], |html| {
            html.text_in("p", &[], "1 < 2");
            html.table(&["system", "#IOPS"], |html| {
                html.row(&["a".into(), "#624".into()]);
            });
        });
        let page = html.page("t & t", "p{color:red}");
        assert_eq!(unbalanced(&page), None, "{page}");
        assert!(page.contains("1 &lt; 2") && page.contains("a&quot;b"), "{page}");
        assert!(page.contains("<td class=\"number\">624</td>"), "{page}");
    }

    #[test]
    fn the_check_can_fail() {
        assert!(unbalanced("<p><b></p></b>").is_some());
        assert!(unbalanced("<p>").is_some());
    }
}
