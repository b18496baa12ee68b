//! [`NeededSetting`]: a setting of librbd without which an image cannot be served right.
//!
//! The client sets them over the configuration of the cluster. The metadata of an image, or of its
//! pool, beats the client, so an image that has other values is refused.

/// See the module.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct NeededSetting {
    pub name: &'static str,
    pub value: &'static str,
    /// The harm of another value, for an error.
    pub otherwise: &'static str,
}

const fn needed(name: &'static str, value: &'static str, otherwise: &'static str) -> NeededSetting {
    NeededSetting { name, value, otherwise }
}

const EARLY: &str = "data would be acknowledged before it is durable";

/// Those that every version has.
pub(super) const NEEDED: [NeededSetting; 3] = [
    needed("rbd_cache", "false", EARLY),
    needed("rbd_non_blocking_aio", "true", "a slow OSD would stop all volumes of the target"),
    // A host may change the bytes of a write that is under way, and librbd may send them twice.
    needed(
        "rbd_disable_zero_copy_writes",
        "true",
        "librbd would use memory of a write after its end",
    ),
];

/// Of a target in no group: the former owner of a lock might still write.
pub(super) const OF_LONE: NeededSetting = needed(
    "rbd_blocklist_on_break_lock",
    "true",
    "a target that takes the lock of a dead client would not fence it",
);

/// Of a member of a group, which fences former owners for years itself. The first fence of a client
/// counts until its end, and a later one changes nothing (measured with Ceph 16.2.15).
pub(super) const OF_MEMBERS: NeededSetting = needed(
    "rbd_blocklist_on_break_lock",
    "false",
    "librbd would fence the former owner of a lock for an hour, and it might write after that",
);

/// Those that some versions do not know.
pub(super) const NEEDED_OF_SOME: [NeededSetting; 2] = [
    needed("rbd_persistent_cache_mode", "disabled", EARLY),
    needed("rbd_parent_cache_enabled", "false", "blocks would be cached on disk"),
];

/// Settings that only a client has. An op waits for the cluster as long as it takes, since an error
/// would reach the host; and the messages of librados do not belong into those of this program.
pub(super) const OF_CLIENTS: [(&str, &str); 3] =
    [("rados_osd_op_timeout", "0"), ("err_to_stderr", "false"), ("log_to_stderr", "false")];

/// The setting that a list of names and values breaks, and the value it has there. `of_lock`: that
/// of the lock.
pub(super) fn broken_in(
    listed: impl IntoIterator<Item = (String, String)>,
    of_lock: NeededSetting,
) -> Option<(NeededSetting, String)> {
    listed.into_iter().find_map(|(name, value)| {
        let mut all = NEEDED.iter().chain(&NEEDED_OF_SOME).chain([&of_lock]);
        let needed = *all.find(|needed| needed.name == name)?;
        (value != needed.value).then_some((needed, value))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_list_that_breaks_a_needed_setting_is_told_by_its_name() {
        let all = NEEDED.iter().chain(&NEEDED_OF_SOME).chain([&OF_LONE]);
        let right: Vec<_> =
            all.map(|needed| (needed.name.to_owned(), needed.value.to_owned())).collect();
        let other = ("rbd_readahead_max_bytes".to_owned(), "0".to_owned());
        assert_eq!(broken_in(right.iter().cloned().chain([other]), OF_LONE), None);
        let (needed, value) = broken_in(right.iter().cloned(), OF_MEMBERS).unwrap();
        assert_eq!((needed, &*value), (OF_MEMBERS, "true"));
        for at in 0..right.len() {
            let mut listed = right.clone();
            "2".clone_into(&mut listed[at].1);
            let (needed, value) = broken_in(listed, OF_LONE).unwrap();
            assert_eq!((needed.name, &*value), (&*right[at].0, "2"));
        }
    }
}
