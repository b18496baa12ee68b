//! Rooms: `src/` of a crate holds directories, lib.rs and main.rs, and a directory holds few files.

use std::collections::BTreeMap;
use std::path::Path;

use super::{Bounds, Source, bound};

/// The crates and directories that hold more files than they may.
pub(super) fn broken(product: &[&Source], bounds: &Bounds) -> Vec<String> {
    let mut broken = Vec::new();
    for (name, most) in bounds.loose {
        let is_loose = |source: &&&Source| {
            source.path.parent() == Some(&Path::new(name).join("src"))
                && !matches!(source.name(), "lib.rs" | "main.rs")
        };
        let count = product.iter().filter(is_loose).count();
        if product.iter().any(|source| source.top() == *name) {
            bound(&format!("loose files in {name}/src"), count, *most, &mut broken);
        }
    }
    for (room, count) in rooms(product) {
        let above = bounds.rooms_above.iter().find(|(name, _)| Path::new(name) == room);
        let most = above.map_or(bounds.room, |(_, most)| *most);
        if count > bounds.room {
            bound(&format!("files in {}", room.display()), count, most, &mut broken);
        }
    }
    broken
}

/// The directories below `src/` of each top directory, and the files in each.
fn rooms<'a>(product: &[&'a Source]) -> BTreeMap<&'a Path, usize> {
    let mut rooms = BTreeMap::new();
    for source in product {
        let is_below_src = source.path.iter().nth(1).is_some_and(|name| name == "src");
        if let Some(room) = source.path.parent()
            && is_below_src
            && room.iter().count() > 2
        {
            *rooms.entry(room).or_default() += 1;
        }
    }
    rooms
}

#[cfg(test)]
mod tests {
    use super::*;

    const BOUNDS: Bounds = Bounds {
        loose: &[("target", 1)],
        room: 2,
        rooms_above: &[("target/src/wide", 3)],
        types: 0,
        what: 0,
        who: 0,
        it: 0,
    };

    fn check(paths: &[&str]) -> Vec<String> {
        let sources: Vec<Source> =
            paths.iter().map(|path| Source { path: path.into(), text: String::new() }).collect();
        broken(&sources.iter().collect::<Vec<_>>(), &BOUNDS)
    }

    #[test]
    fn files_are_counted_where_they_lie() {
        let good =
            ["target/src/lib.rs", "target/src/a.rs", "target/src/r/a.rs", "target/src/r/b.rs"];
        assert!(check(&good).is_empty());
        let loose = check(&["target/src/lib.rs", "target/src/a.rs", "target/src/b.rs"]);
        assert!(loose.len() == 1 && loose[0].contains("loose files in target/src: 2"), "{loose:?}");
        let full = check(&["target/src/r/a.rs", "target/src/r/b.rs", "target/src/r/c.rs"]);
        assert!(full.len() == 1 && full[0].contains("target/src/r: 3"), "{full:?}");
        let wide = ["target/src/wide/a.rs", "target/src/wide/b.rs", "target/src/wide/c.rs"];
        assert!(check(&wide).is_empty());
    }
}
