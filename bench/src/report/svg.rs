//! [`Svg`]: a drawing, written by hand.
//!
//! Shapes have classes and no colours of their own: the page that a drawing is in says what they
//! look like, in light and in dark ([`style`](super::style)). Everything that a shape stands for is
//! in its `<title>`, which browsers show where the pointer is and screen readers read out.

use std::fmt::Write;

/// Where a text is put relative to its point.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Anchor {
    /// It begins there.
    Start,
    /// It is centred there.
    Middle,
    /// It ends there.
    End,
}

/// A drawing.
#[derive(Clone, Debug)]
pub struct Svg {
    width: f64,
    height: f64,
    title: String,
    body: String,
}

/// Text inside XML and HTML, between tags or in a quoted attribute. Characters that XML cannot hold
/// are replaced.
#[must_use]
pub fn escape(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for character in text.chars() {
        match character {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '"' => out.push_str("&quot;"),
            '\'' => out.push_str("&#39;"),
            '\t' | '\n' | '\r' => out.push(character),
            c if c.is_control() => out.push('\u{fffd}'),
            c => out.push(c),
        }
    }
    out
}

/// A coordinate: one decimal, and nothing that is not a number.
fn number(value: f64) -> String {
    if !value.is_finite() {
        return "0".to_owned();
    }
    let text = format!("{value:.1}");
    let text = text.strip_suffix(".0").unwrap_or(&text);
    if text == "-0" { "0".to_owned() } else { text.to_owned() }
}

impl Svg {
    /// An empty drawing; `title` is what it shows, in a line.
    #[must_use]
    pub fn new(width: f64, height: f64, title: &str) -> Self {
        Self { width, height, title: title.to_owned(), body: String::new() }
    }

    fn push(&mut self, element: &str, tip: Option<&str>) {
        // Writing to a String cannot fail.
        let _ = match tip {
            Some(tip) => {
                let name = element.split([' ', '>']).next().unwrap_or(element);
                writeln!(self.body, "<{element}><title>{}</title></{name}>", escape(tip))
            }
            None => writeln!(self.body, "<{element}/>"),
        };
    }

    /// A rectangle from its upper left corner; one of no extent is left out.
    pub fn rect(&mut self, at: (f64, f64), size: (f64, f64), class: &str, tip: Option<&str>) {
        if size.0 <= 0.0 || size.1 <= 0.0 {
            return;
        }
        let (x, y, w, h) = (number(at.0), number(at.1), number(size.0), number(size.1));
        let class = escape(class);
        let rect =
            format!(r#"rect x="{x}" y="{y}" width="{w}" height="{h}" rx="2" class="{class}""#);
        self.push(&rect, tip);
    }

    /// A straight line.
    pub fn line(&mut self, from: (f64, f64), to: (f64, f64), class: &str, tip: Option<&str>) {
        let (x1, y1, x2, y2) = (number(from.0), number(from.1), number(to.0), number(to.1));
        let class = escape(class);
        self.push(&format!(r#"line x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}" class="{class}""#), tip);
    }

    /// A line through points.
    pub fn polyline(&mut self, points: &[(f64, f64)], class: &str, tip: Option<&str>) {
        let points: Vec<String> =
            points.iter().map(|(x, y)| format!("{},{}", number(*x), number(*y))).collect();
        let class = escape(class);
        self.push(&format!(r#"polyline points="{}" class="{class}""#, points.join(" ")), tip);
    }

    /// A mark at a point; systems differ in its shape as well as in colour.
    pub fn mark(&mut self, at: (f64, f64), shape: usize, class: &str, tip: Option<&str>) {
        const R: f64 = 4.0;
        let (x, y) = at;
        let polygon = |corners: &[(f64, f64)]| {
            let corners: Vec<String> = corners
                .iter()
                .map(|(dx, dy)| format!("{},{}", number(x + dx * R), number(y + dy * R)))
                .collect();
            format!(r#"polygon points="{}" class="{}""#, corners.join(" "), escape(class))
        };
        let element = match shape % 5 {
            0 => {
                let (x, y) = (number(x), number(y));
                format!(r#"circle cx="{x}" cy="{y}" r="{R}" class="{}""#, escape(class))
            }
            1 => polygon(&[(-0.9, -0.9), (0.9, -0.9), (0.9, 0.9), (-0.9, 0.9)]),
            2 => polygon(&[(0.0, -1.3), (1.2, 0.9), (-1.2, 0.9)]),
            3 => polygon(&[(0.0, -1.3), (1.3, 0.0), (0.0, 1.3), (-1.3, 0.0)]),
            _ => polygon(&[(0.0, 1.3), (1.2, -0.9), (-1.2, -0.9)]),
        };
        self.push(&element, tip);
    }

    /// A text; `tip` says what the text leaves out.
    pub fn text(
        &mut self,
        at: (f64, f64),
        anchor: Anchor,
        class: &str,
        text: &str,
        tip: Option<&str>,
    ) {
        let anchor = match anchor {
            Anchor::Start => "start",
            Anchor::Middle => "middle",
            Anchor::End => "end",
        };
        let tip = tip.map(|tip| format!("<title>{}</title>", escape(tip))).unwrap_or_default();
        let (x, y, class, text) = (number(at.0), number(at.1), escape(class), escape(text));
        let _ = writeln!(
            self.body,
            r#"<text x="{x}" y="{y}" text-anchor="{anchor}" class="{class}">{tip}{text}</text>"#
        );
    }

    /// What it shows.
    #[must_use]
    pub fn title(&self) -> &str {
        &self.title
    }

    fn head(&self) -> String {
        let (w, h) = (number(self.width), number(self.height));
        let title = escape(&self.title);
        format!(r#"viewBox="0 0 {w} {h}" role="img" aria-label="{title}" class="plot""#)
    }

    /// A file of its own, with the style.
    #[must_use]
    pub fn file(&self, style: &str) -> String {
        let (w, h) = (number(self.width), number(self.height));
        format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{w}\" height=\"{h}\" {}>\n\
             <style>\n{style}</style>\n\
             <rect width=\"{w}\" height=\"{h}\" class=\"ground\"/>\n{}</svg>\n",
            self.head(),
            self.body
        )
    }

    /// For a place inside an HTML page that has the style.
    #[must_use]
    pub fn inline(&self) -> String {
        format!("<svg {}>\n{}</svg>\n", self.head(), self.body)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_is_escaped() {
        assert_eq!(escape(r#"<a href="x">&'"#), "&lt;a href=&quot;x&quot;&gt;&amp;&#39;");
        assert_eq!(escape("a\u{0}b\u{1b}[0m"), "a\u{fffd}b\u{fffd}[0m");
    }

    #[test]
    fn coordinates_are_short_and_finite() {
        for (value, text) in
            [(1.0, "1"), (1.25, "1.2"), (-0.01, "0"), (f64::NAN, "0"), (f64::INFINITY, "0")]
        {
            assert_eq!(number(value), text);
        }
    }

    #[test]
    fn a_drawing_is_what_it_always_was() {
        let mut svg = Svg::new(100.0, 50.0, "A & B");
        svg.rect((1.0, 2.0), (3.55, 4.0), "bar s0", Some("a < b"));
        svg.rect((1.0, 2.0), (0.0, 4.0), "bar s0", None);
        svg.line((0.0, 0.0), (10.0, 0.0), "axis", None);
        svg.polyline(&[(0.0, 1.0), (2.0, 3.0)], "line s1", None);
        svg.mark((5.0, 5.0), 0, "s1", Some("x"));
        svg.mark((5.0, 5.0), 3, "s1", None);
        svg.text((1.0, 1.0), Anchor::End, "label", "50 %", None);
        assert_eq!(
            svg.inline(),
            "<svg viewBox=\"0 0 100 50\" role=\"img\" aria-label=\"A &amp; B\" class=\"plot\">\n\
             <rect x=\"1\" y=\"2\" width=\"3.5\" height=\"4\" rx=\"2\" class=\"bar s0\"><title>a &lt; b</title></rect>\n\
             <line x1=\"0\" y1=\"0\" x2=\"10\" y2=\"0\" class=\"axis\"/>\n\
             <polyline points=\"0,1 2,3\" class=\"line s1\"/>\n\
             <circle cx=\"5\" cy=\"5\" r=\"4\" class=\"s1\"><title>x</title></circle>\n\
             <polygon points=\"5,-0.2 10.2,5 5,10.2 -0.2,5\" class=\"s1\"/>\n\
             <text x=\"1\" y=\"1\" text-anchor=\"end\" class=\"label\">50 %</text>\n\
             </svg>\n"
        );
    }
}
