//! [`Page`]: a report that is being written, with its sections and drawings; and the order and
//! looks of systems, which are the same in every section.

use crate::result::{Run, SystemInfo, system};

use super::html::Html;
use super::style;
use super::svg::Svg;

/// A report that is being written.
#[derive(Debug, Default)]
pub(super) struct Page {
    /// The page.
    pub(super) html: Html,
    /// Anchors and titles of its sections.
    pub(super) sections: Vec<(&'static str, &'static str)>,
}

impl Page {
    /// A section with its heading and what to know before looking.
    pub(super) fn section(&mut self, id: &'static str, title: &'static str, lead: &str) {
        self.sections.push((id, title));
        self.html.text_in("h2", &[("id", id)], title);
        if !lead.is_empty() {
            self.html.text_in("p", &[("class", "soft")], lead);
        }
    }

    /// A drawing on a card. `name` is its anchor in the page.
    pub(super) fn card(&mut self, name: &str, svg: &Svg, wide: bool, caption: &str) {
        let class = if wide { "card wide" } else { "card" };
        self.html.element("figure", &[("class", class), ("id", name)], |html| {
            html.raw(&svg.inline());
            if !caption.is_empty() {
                html.text_in("figcaption", &[], caption);
            }
        });
    }

    /// Cards side by side.
    pub(super) fn cards(&mut self, inside: impl FnOnce(&mut Self)) {
        self.html.raw("<div class=\"cards\">\n");
        inside(self);
        self.html.raw("</div>\n");
    }
}

/// Systems of a run in their fixed order.
#[must_use]
pub(super) fn systems(run: &Run) -> Vec<&SystemInfo> {
    let mut systems: Vec<&SystemInfo> = run.systems.iter().collect();
    let place = |info: &SystemInfo| system::ORDER.iter().position(|known| *known == info.key);
    systems.sort_by_key(|info| place(info).unwrap_or(usize::MAX));
    systems
}

/// A system's name for people.
#[must_use]
pub(super) fn title(info: &SystemInfo) -> &str {
    if info.title.is_empty() { &info.key } else { &info.title }
}

/// A system's look in this run.
#[must_use]
pub(super) fn look(run: &Run, key: &str) -> usize {
    let others: Vec<&str> = run.systems.iter().map(|info| info.key.as_str()).collect();
    style::look(key, &others)
}
