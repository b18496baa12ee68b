//! How much of the cache the volumes of a target may have: [`CacheRoom`] for all their `cache_min`
//! together, and for each `cache_max` alone.

use crate::error::Fault;
use crate::units::ByteSize;
use crate::volume::{CACHE_PART_LEAST, CacheMode, StoreKind, VolumeConfig};

/// The fraction of the arena, less the dirty limit, that volumes may keep at most: one of this many
/// parts. The rest is shared.
const PART: u64 = 2;

/// The memory that volumes may keep a part of.
#[derive(Clone, Copy, Debug)]
pub(crate) struct CacheRoom {
    /// All of it.
    pub(crate) arena: ByteSize,
    /// The dirty limit, if it is given.
    pub(crate) dirty_max: Option<ByteSize>,
    /// The dirty limit, given or default.
    pub(crate) dirty_limit: ByteSize,
}

impl CacheRoom {
    /// Most that these volumes may keep together.
    fn limit(&self, volumes: &[VolumeConfig]) -> u64 {
        let dirty = if write_back(volumes) { self.dirty_limit.0 } else { 0 };
        self.arena.0.saturating_sub(dirty) / PART / 4096 * 4096
    }

    /// The smallest arena, in whole MiB, in which these volumes can keep so much.
    fn arena_for(&self, volumes: &[VolumeConfig], sum: u64) -> ByteSize {
        let needed = match (write_back(volumes), self.dirty_max) {
            (false, _) => sum.saturating_mul(PART),
            (true, Some(dirty)) => sum.saturating_mul(PART).saturating_add(dirty.0),
            // A quarter may be dirty.
            (true, None) => sum.saturating_mul(4 * PART).div_ceil(3),
        };
        ByteSize(needed.div_ceil(1 << 20).saturating_mul(1 << 20))
    }
}

fn write_back(volumes: &[VolumeConfig]) -> bool {
    volumes.iter().any(|volume| volume.cache == Some(CacheMode::WriteBack))
}

/// Adds the faults between `cache_min`, `cache_max` and other keys.
pub(crate) fn relate(volumes: &[VolumeConfig], room: &CacheRoom, faults: &mut Vec<Fault>) {
    relate_mins(volumes, room, faults);
    for (index, volume) in volumes.iter().enumerate() {
        faults.extend(max_fault(volume, index, room.arena));
    }
}

/// The fault of the `cache_max` of a volume.
fn max_fault(volume: &VolumeConfig, index: usize, arena: ByteSize) -> Option<Fault> {
    let max = volume.cache_max?;
    let key = format!("volume[{index}].cache_max");
    let is_below = |min: &ByteSize| min.0 > max.0;
    let fault = if let Some(mut fault) = uncached(volume, &key, "cache_max") {
        fault.rests_beside = true;
        fault
    } else if max.0 > arena.0 {
        let problem = format!("the volume cannot have more than arena = \"{arena}\"");
        let fix = format!("remove cache_max, or lower it to at most \"{arena}\"");
        Fault::new(key, problem, fix).rests_on(&["arena"])
    } else if let Some(min) = volume.cache_min.filter(is_below) {
        let problem = format!("the volume keeps more: cache_min = \"{min}\"");
        let fix = format!("raise it to \"{min}\", or lower cache_min to \"{max}\"");
        let mut fault = Fault::new(key, problem, fix);
        fault.rests_beside = true;
        fault
    } else {
        return None;
    };
    Some(fault.value(max.to_string()))
}

fn relate_mins(volumes: &[VolumeConfig], room: &CacheRoom, faults: &mut Vec<Fault>) {
    let (limit, mut sum) = (room.limit(volumes), 0u64);
    let mins = volumes.iter().filter_map(|volume| volume.cache_min);
    let all = mins.fold(0u64, |all, min| all.saturating_add(min.0));
    for (index, volume) in volumes.iter().enumerate() {
        let Some(min) = volume.cache_min else { continue };
        let key = format!("volume[{index}].cache_min");
        if let Some(mut fault) = uncached(volume, &key, "cache_min") {
            fault.rests_beside = true;
            faults.push(fault.value(min.to_string()));
            continue;
        }
        let before = sum;
        sum = sum.saturating_add(min.0);
        if before > limit || sum <= limit {
            continue;
        }
        // Of the volume with which they are too much.
        let problem = format!(
            "all volumes together keep {}, and at most {} can be kept of arena = \"{}\": half of what is never \
             dirty",
            ByteSize(all),
            ByteSize(limit),
            room.arena
        );
        let left = min.0.saturating_sub(all - limit.min(all)) / 4096 * 4096;
        let lower = match left {
            CACHE_PART_LEAST.. => format!("lower it to \"{}\"", ByteSize(left)),
            _ => "remove it or lower those of other volumes".to_owned(),
        };
        let fix = format!("{lower}, or raise arena to \"{}\"", room.arena_for(volumes, all));
        let fault = Fault::new(key, problem, fix).value(min.to_string());
        faults.push(fault.rests_on(&[
            "arena",
            "dirty_max",
            "volume[].cache",
            "volume[].cache_min",
        ]));
    }
}

/// The fault of a volume that has nothing in the cache.
fn uncached(volume: &VolumeConfig, key: &str, name: &str) -> Option<Fault> {
    let problem = match (volume.store, volume.cache) {
        (StoreKind::Memory | StoreKind::Null, _) => {
            format!("store = \"{}\" is not cached", volume.store)
        }
        (StoreKind::File | StoreKind::Rbd, Some(CacheMode::None)) => {
            "cache = \"none\" keeps nothing".to_owned()
        }
        (StoreKind::File | StoreKind::Rbd, _) => return None,
    };
    Some(Fault::new(key, problem, format!("remove {name}")))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::TargetConfig;

    fn config(global: &str, volumes: &[&str]) -> Result<TargetConfig, String> {
        let mut text = format!("listen = ['tcp://127.0.0.1']\n{global}");
        for (index, keys) in volumes.iter().enumerate() {
            text += &format!(
                "[[volume]]\nname = 'v{index}'\nstore = 'file'\npath = '/srv/{index}'\n{keys}"
            );
        }
        TargetConfig::parse(&text, "t.toml").map_err(|error| error.to_string())
    }

    #[test]
    fn what_volumes_keep_must_fit() {
        let back = "cache = 'write-back'\n";
        let min = |size: &str| format!("cache_min = '{size}'\n");
        let kept = config("arena = '64MiB'\n", &[&min("20MiB"), &min("12MiB")]).unwrap();
        assert_eq!(kept.volumes[0].cache_min, Some(ByteSize(20 << 20)));
        let again = TargetConfig::parse(&kept.dump().unwrap(), "t.toml").unwrap();
        assert_eq!(again.volumes, kept.volumes, "a dump loads to the same");
        let with_dirty = format!("{back}{}", min("24MiB"));
        assert!(config("arena = '64MiB'\n", &[&with_dirty]).is_ok());
        for (global, volumes, words) in [
            (
                "arena = '64MiB'\n",
                [min("20MiB"), min("13MiB")],
                ["keep 33MiB", "at most 32MiB", "to \"12MiB\", or raise arena to \"66MiB\""],
            ),
            (
                "arena = '64MiB'\n",
                [with_dirty.clone(), min("1MiB")],
                ["keep 25MiB", "at most 24MiB", "remove it or lower those of other volumes"],
            ),
            (
                "arena = '64MiB'\ndirty_max = '32MiB'\n",
                [min("1MiB"), with_dirty.clone()],
                ["keep 25MiB", "at most 16MiB", "to \"15MiB\", or raise arena to \"82MiB\""],
            ),
        ] {
            let error = config(global, &[&volumes[0], &volumes[1]]).unwrap_err();
            assert!(words.iter().all(|words| error.contains(words)), "{error}");
            assert_eq!(error.matches("cache_min").count(), 1, "one fault: {error}");
        }
    }

    #[test]
    fn what_is_raised_as_told_fits() {
        for dirty in ["", "dirty_max = '7MiB'\n"] {
            for back in ["", "cache = 'write-back'\n"] {
                for mib in [20u64, 33, 97] {
                    let keys = format!("{back}cache_min = '{mib}MiB'\n");
                    let error = config(&format!("arena = '16MiB'\n{dirty}"), &[&keys]).unwrap_err();
                    let told = error.split("raise arena to \"").nth(1).unwrap();
                    let told = told.split('"').next().unwrap();
                    let raised = config(&format!("arena = '{told}'\n{dirty}"), &[&keys]);
                    assert!(raised.is_ok(), "{error}: {raised:?}");
                }
            }
        }
    }

    #[test]
    fn a_maximum_is_between_the_minimum_and_the_arena() {
        let of = |min: &str, max: &str| {
            let min = if min.is_empty() { String::new() } else { format!("cache_min = '{min}'\n") };
            config("arena = '64MiB'\n", &[&format!("{min}cache_max = '{max}'\n")])
        };
        for (min, max, bytes) in
            [("", "1MiB", 1 << 20), ("8MiB", "8MiB", 8 << 20), ("", "64MiB", 64 << 20)]
        {
            let kept = of(min, max).unwrap();
            assert_eq!(kept.volumes[0].cache_max, Some(ByteSize(bytes)));
            let again = TargetConfig::parse(&kept.dump().unwrap(), "t.toml").unwrap();
            assert_eq!(again.volumes, kept.volumes, "a dump loads to the same");
        }
        for (min, max, words) in [
            (
                "",
                "65MiB",
                "cannot have more than arena = \"64MiB\"; remove cache_max, or lower it to at most \"64MiB\"",
            ),
            (
                "9MiB",
                "8MiB",
                "keeps more: cache_min = \"9MiB\"; raise it to \"9MiB\", or lower cache_min to \"8MiB\"",
            ),
            ("", "1000KiB", "cache_max"),
        ] {
            let error = of(min, max).unwrap_err();
            assert!(error.contains(words), "{error}");
            assert_eq!(error.lines().count(), 1, "one fault: {error}");
        }
        // Each for itself: they need not fit together.
        let max = "cache_max = '64MiB'\n";
        assert!(config("arena = '64MiB'\n", &[max, max]).is_ok());
        let error = config("", &["cache = 'none'\ncache_max = '1MiB'\n"]).unwrap_err();
        assert!(error.contains("keeps nothing; remove cache_max"), "{error}");
    }

    #[test]
    fn what_is_not_cached_keeps_nothing() {
        let error = config("", &["cache = 'none'\ncache_min = '1MiB'\n"]).unwrap_err();
        assert!(error.contains("keeps nothing; remove cache_min"), "{error}");
        let memory = "listen = ['tcp://127.0.0.1']\n[[volume]]\nname = 'a'\nstore = 'memory'\nsize = '1MiB'\n\
                      cache_min = '1MiB'\n";
        let error = TargetConfig::parse(memory, "t.toml").unwrap_err().to_string();
        assert!(error.contains("store = \"memory\" is not cached; remove cache_min"), "{error}");
        for size in ["4KiB", "1000001"] {
            assert!(config("", &[&format!("cache_min = '{size}'\n")]).is_err());
        }
    }
}
