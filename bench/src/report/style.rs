//! What drawings and the page look like: fixed colours per system, light and dark.
//!
//! The colours are those of Okabe and Ito with few changes: they differ for people who see fewer
//! colours, and in grey. Ours are blue, the kernel's peers are warm, floors are grey and green.
//! Shape and dashes say the same again.

use crate::result::system;

/// How many looks there are.
const LOOKS: usize = 12;

/// Light and dark colour of each look: first the systems in [`system::ORDER`], then those of other
/// names.
const COLOURS: [(&str, &str); LOOKS] = [
    ("#0063a6", "#3f9be6"),
    ("#6a51b0", "#a493f0"),
    ("#4aa8de", "#8bd2fb"),
    ("#d55e00", "#f5853a"),
    ("#e69f00", "#f6bd3f"),
    ("#c2649a", "#e39bc3"),
    ("#7c828b", "#a2a8b1"),
    ("#b1b6bd", "#6d747e"),
    ("#009e73", "#34c79b"),
    ("#8c5a2b", "#c99867"),
    ("#5c7f1c", "#a9cc5f"),
    ("#a3262a", "#ef7f82"),
];

/// How a system looks: an index for [`class`] and for the shapes of
/// [`Svg::mark`](super::svg::Svg::mark).
///
/// A system that [`system::ORDER`] does not have takes one of the last looks, by its place among
/// such systems.
#[must_use]
pub fn look(key: &str, others: &[&str]) -> usize {
    if let Some(at) = system::ORDER.iter().position(|known| *known == key) {
        return at;
    }
    let first = system::ORDER.len();
    let at = others
        .iter()
        .filter(|other| !system::ORDER.contains(other))
        .position(|other| *other == key)
        .unwrap_or(0);
    first + at % (LOOKS - first)
}

/// The class of a look.
#[must_use]
pub fn class(look: usize) -> String {
    format!("s{}", look % LOOKS)
}

fn variables(dark: bool) -> String {
    let colours: String = COLOURS
        .iter()
        .enumerate()
        .map(|(at, (light, darker))| format!("--s{at}:{};", if dark { darker } else { light }))
        .collect();
    let rest = if dark {
        "--ground:#14171c;--card:#1c2026;--ink:#e8eaed;--soft:#a3abb6;--faint:#353b45;--good:#34c79b;--bad:#f5853a;\
         --good-ground:#123528;--bad-ground:#3c2412"
    } else {
        "--ground:#fbfbfa;--card:#fff;--ink:#1b1f24;--soft:#5b6470;--faint:#e2e5e9;--good:#00704f;--bad:#b34700;\
         --good-ground:#e0f4ec;--bad-ground:#fdebdd"
    };
    format!("{colours}{rest}")
}

/// The style of a drawing that is a file of its own.
#[must_use]
pub fn drawing() -> String {
    let mut text = format!(
        ":root{{color-scheme:light dark;{}}}\n@media (prefers-color-scheme:dark){{:root{{{}}}}}\n",
        variables(false),
        variables(true)
    );
    for look in 0..LOOKS {
        text += &format!(".s{look}{{fill:var(--s{look});stroke:var(--s{look})}}\n");
    }
    text + DRAWING
}

/// The style of the page and of the drawings in it.
#[must_use]
pub fn page() -> String {
    drawing() + PAGE
}

const DRAWING: &str = "\
.plot{font:12px system-ui,-apple-system,'Segoe UI',Roboto,'Noto Sans',sans-serif}
.plot text{fill:var(--ink);stroke:none}
.plot .soft{fill:var(--soft)}
.plot .name{font-weight:600}
.plot .small{font-size:11px;fill:var(--soft)}
.plot .head{font-size:13px;font-weight:600}
.ground{fill:var(--card);stroke:none}
.grid{stroke:var(--faint);stroke-width:1}
.axis{stroke:var(--soft);stroke-width:1}
.bar{stroke:none;opacity:.92}
.bar:hover,.dot:hover{opacity:.65}
.behind,.single{opacity:.45}
.cut{stroke:var(--card);stroke-width:2.5}
.whisker{stroke:var(--ink);stroke-width:1.4;opacity:.75}
.mean{stroke:var(--ink);stroke-width:1.5;stroke-dasharray:5 4}
.need{fill:var(--ink);stroke:var(--card);stroke-width:1.5}
.line{fill:none;stroke-width:2.2;stroke-linejoin:round;stroke-linecap:round}
.line:hover{stroke-width:4}
.dash{stroke-dasharray:6 4}
.spread{stroke-width:1.4;opacity:.55;fill:none}
.dot{stroke:var(--card);stroke-width:1.2}
.once{fill:var(--card);stroke-width:1.6}
";

const PAGE: &str = "\
*{box-sizing:border-box}
body{margin:0;background:var(--ground);color:var(--ink);font:15px/1.55 system-ui,-apple-system,'Segoe UI',Roboto,'Noto Sans',sans-serif}
main,header,footer{max-width:1120px;margin:0 auto;padding:0 24px}
header{padding-top:44px}
h1{font-size:30px;line-height:1.2;letter-spacing:-.015em;margin:0 0 6px}
h2{font-size:20px;margin:52px 0 6px;letter-spacing:-.01em}
h3{font-size:15px;margin:22px 0 4px}
p{margin:6px 0 12px;max-width:78ch}
a{color:var(--s0)}
code{font:13px ui-monospace,'SF Mono',Menlo,Consolas,monospace}
pre{overflow-x:auto;background:var(--card);border:1px solid var(--faint);border-radius:8px;padding:10px 14px;margin:8px 0}
.soft,.lead{color:var(--soft)}
.lead{font-size:16px}
nav{display:flex;flex-wrap:wrap;gap:6px 16px;margin:14px 0 0;font-size:14px}
nav a{text-decoration:none}
nav a:hover{text-decoration:underline}
.tiles{display:grid;grid-template-columns:repeat(auto-fill,minmax(160px,1fr));gap:12px;margin:22px 0}
.tile{background:var(--card);border:1px solid var(--faint);border-radius:10px;padding:12px 16px}
.tile b{display:block;font-size:27px;line-height:1.2;font-variant-numeric:tabular-nums}
.tile span{display:block;font-size:13px;color:var(--soft)}
.tile.good b{color:var(--good)}
.tile.bad b{color:var(--bad)}
.cards{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,480px),1fr));gap:16px;margin:14px 0}
.card{background:var(--card);border:1px solid var(--faint);border-radius:10px;padding:14px 16px;margin:0;min-width:0}
.card.wide{margin:14px 0}
.card svg{width:100%;height:auto;display:block}
figcaption{font-size:13px;color:var(--soft);margin-top:6px}
.scroll{overflow-x:auto;background:var(--card);border:1px solid var(--faint);border-radius:10px;margin:14px 0}
table{border-collapse:collapse;width:100%;font-size:14px}
th,td{padding:5px 12px;text-align:left;border-bottom:1px solid var(--faint);vertical-align:top}
tr:last-child td{border-bottom:0}
th{font-weight:600;color:var(--soft);font-size:13px;white-space:nowrap}
td.number,th.number{text-align:right;font-variant-numeric:tabular-nums;white-space:nowrap}
tr.part td{background:var(--ground);font-weight:600}
.badge{display:inline-block;border-radius:99px;padding:1px 10px;font-size:12px;font-weight:600;white-space:nowrap;background:var(--faint);color:var(--soft)}
.badge.met{background:var(--good-ground);color:var(--good)}
.badge.short{background:var(--bad-ground);color:var(--bad)}
.key{display:inline-block;width:11px;height:11px;border-radius:3px;margin-right:8px;vertical-align:-1px}
details{margin:8px 0}
summary{cursor:pointer}
footer{padding-top:40px;padding-bottom:60px;color:var(--soft);font-size:13px}
@media (max-width:640px){header{padding-top:24px}h1{font-size:24px}main,header,footer{padding-left:14px;padding-right:14px}th,td{padding:6px 8px}}
@media print{body{background:#fff}.card,.scroll{break-inside:avoid}}
";

/// The style attribute that paints a swatch of a look.
#[must_use]
pub fn swatch(look: usize) -> String {
    format!("background:var(--s{})", look % LOOKS)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_system_always_looks_the_same() {
        for (at, key) in system::ORDER.into_iter().enumerate() {
            assert_eq!(look(key, &["x", key]), at);
        }
        let others = ["spdk", system::NBD, "drbd"];
        let next = system::ORDER.len();
        assert_eq!((look("spdk", &others), look("drbd", &others)), (next, next + 1));
        // More than there are looks for is no panic.
        assert!(class(look("nobody", &[])).starts_with('s'));
    }

    #[test]
    fn every_look_has_its_colours() {
        let text = page();
        for at in 0..LOOKS {
            assert_eq!(text.matches(&format!("--s{at}:")).count(), 2, "light and dark of {at}");
        }
    }
}
