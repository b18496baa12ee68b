//! [`Silent`]: a mount that does not answer, or a disk without a note: a line for people and an
//! entry for programs in `list`.

use rblk_operate::mount::mount_status::MountStatus;
use serde::Serialize;

/// The known facts about a mount that does not answer.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub(crate) struct Silent {
    /// The mount.
    #[serde(skip_serializing_if = "Option::is_none")]
    name: Option<String>,
    /// The disk, if only that is known.
    #[serde(skip_serializing_if = "Option::is_none")]
    device: Option<String>,
    /// `no answer`, `bad note`, `dead`, `no server`, `ending`; `no note` of a disk.
    state: String,
    /// The problem and its remedy.
    problem: String,
}

impl Silent {
    /// A mount.
    pub(crate) fn mount(name: &str, state: &str, problem: String) -> Self {
        Self { name: Some(name.to_owned()), device: None, state: state.to_owned(), problem }
    }

    /// A disk without a note.
    pub(crate) fn disk(device: String, problem: String) -> Self {
        Self { name: None, device: Some(device), state: "no note".to_owned(), problem }
    }

    /// The name of the mount and its state; `None` for a disk.
    pub(crate) fn named(&self) -> Option<(&str, &str)> {
        Some((self.name.as_deref()?, &self.state))
    }

    /// The line for people.
    pub(crate) fn line(&self) -> &str {
        &self.problem
    }
}

/// An entry of the list.
#[derive(Serialize)]
#[serde(untagged)]
pub(crate) enum Entry<'l> {
    Mount(&'l MountStatus),
    Silent(&'l Silent),
}

/// The list for programs: each mount once, and the lines that people read below the table.
pub(crate) fn entries<'l>(mounts: &'l [MountStatus], silent: &'l [Silent]) -> Vec<Entry<'l>> {
    let is_listed = |silent: &Silent| {
        mounts.iter().any(|mount| silent.name.as_ref().is_some_and(|name| *name == mount.name))
    };
    let others = silent.iter().filter(|silent| !is_listed(silent));
    mounts.iter().map(Entry::Mount).chain(others.map(Entry::Silent)).collect()
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    #[test]
    fn json_has_silent_mounts_too() {
        let waiting =
            MountStatus { name: "a".into(), state: "no server".into(), ..Default::default() };
        let silent = [
            Silent::mount("a", "no server", "a: its process died".into()),
            Silent::mount("b", "no answer", "b: its process does not answer".into()),
            Silent::disk("/dev/ublkb3".into(), "/dev/ublkb3: its note is gone".into()),
        ];
        let said = serde_json::to_value(entries(&[waiting], &silent)).unwrap();
        let said = said.as_array().unwrap();
        assert_eq!((said.len(), &said[0]["state"]), (3, &Value::from("no server")));
        assert_eq!(
            said[1..],
            [
                json!({"name": "b", "state": "no answer", "problem": "b: its process does not answer"}),
                json!({"device": "/dev/ublkb3", "state": "no note", "problem": "/dev/ublkb3: its note is gone"}),
            ]
        );
    }
}
