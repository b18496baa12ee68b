//! [`Key`]: the description of one key; [`Schema`]: the keys of one table; `key_table!`: makes the
//! type of a configuration, its defaults and its schema of one description of each key.
//!
//! The parser of files, the flags of commands, their help, the reference in docs/keys.md and the
//! example files follow from this description.

use toml::{Table, Value};

use crate::error::Fault;
use crate::schema::rule::{Rule, join, nearest};
use crate::units::Duration;

/// The keys that one table may have.
#[derive(Debug)]
pub struct Schema {
    /// In the order of the examples.
    pub(crate) entries: &'static [Key],
    /// The values of the keys that have a default.
    pub(crate) defaults: fn() -> Table,
    /// Keys of former versions.
    pub(crate) retired: &'static [RetiredKey],
}

/// The description of a key.
#[derive(Clone, Copy, Debug)]
pub struct Key {
    /// The name.
    pub name: &'static str,
    /// Whether the key must be given.
    pub required: bool,
    /// The allowed values of the key.
    pub rule: Rule,
    /// Whether a reload applies a new value to a target or a mount that runs.
    pub live: bool,
    /// The meaning of its absence. Empty for a key with a default.
    pub absent: &'static str,
    /// A value for the example file, as TOML. Empty for a key with a default.
    pub example: &'static str,
    /// The place in docs/ that says more, such as `security.md#encryption`. May be empty.
    pub more: &'static str,
    text: &'static str,
    flag: Flag,
    bare: &'static str,
}

/// The flag of a key.
#[derive(Clone, Copy, Debug)]
enum Flag {
    /// None: a command has an argument of its own for the key, or only files have the key.
    None,
    /// The name of the key, with `-` for `_`.
    Same,
    /// Another name.
    Named(&'static str),
}

/// A key of former versions, which has no effect any more. A file that has it is accepted.
#[derive(Debug)]
pub struct RetiredKey {
    /// The name.
    pub name: &'static str,
    /// The version that ignores it first.
    pub since: &'static str,
    /// The behaviour now.
    pub now: &'static str,
}

impl Key {
    /// A key with a default, which [`key_table!`] names and describes.
    pub(crate) const fn new(rule: Rule) -> Self {
        Self {
            name: "",
            required: false,
            rule,
            live: false,
            absent: "",
            example: "",
            more: "",
            text: "",
            flag: Flag::Same,
            bare: "",
        }
    }

    /// A key with a whole number. Bounds are inclusive, here and below.
    pub(crate) const fn count(min: u32, max: u32) -> Self {
        Self::new(Rule::Count { min, max })
    }

    /// A key with a size.
    pub(crate) const fn size(min: u64, max: u64, step: u64) -> Self {
        Self::new(Rule::Size { min, max, step })
    }

    /// A key with a time.
    pub(crate) const fn span(min: Duration, max: Duration) -> Self {
        Self::new(Rule::Span { min, max })
    }

    /// A key with one of a few words.
    pub(crate) const fn word(words: &'static [&'static str]) -> Self {
        Self::new(Rule::Word(words))
    }

    /// A key with a list.
    pub(crate) const fn list(item: &'static Rule, max: usize) -> Self {
        Self::new(Rule::List { item, max })
    }

    /// Sets name and description.
    pub(crate) const fn described(self, name: &'static str, text: &'static str) -> Self {
        let name = if self.name.is_empty() { name } else { self.name };
        Self { name, text, ..self }
    }

    /// Says that the name differs from that of the field.
    pub(crate) const fn named(self, name: &'static str) -> Self {
        Self { name, ..self }
    }

    /// Says that the key must be given, with a value for the example file.
    pub(crate) const fn required(self, example: &'static str) -> Self {
        Self { required: true, example, ..self }
    }

    /// Says what the absence of the key means, with a value for the example file.
    pub(crate) const fn absent(self, meaning: &'static str, example: &'static str) -> Self {
        Self { absent: meaning, example, ..self }
    }

    /// Says that a reload applies a new value.
    pub(crate) const fn live(self) -> Self {
        Self { live: true, ..self }
    }

    /// Names the place in docs/ that says more.
    pub(crate) const fn more(self, place: &'static str) -> Self {
        Self { more: place, ..self }
    }

    /// Names the flag. The name of the key is a second name of the flag, unless it is the plural.
    pub(crate) const fn flag(self, name: &'static str) -> Self {
        Self { flag: Flag::Named(name), ..self }
    }

    /// Names the value of the flag without a value.
    pub(crate) const fn bare(self, value: &'static str) -> Self {
        Self { bare: value, ..self }
    }

    /// Says that no flag is made of the key.
    pub(crate) const fn no_flag(self) -> Self {
        Self { flag: Flag::None, ..self }
    }

    /// The name of its flag, without the dashes.
    #[must_use]
    pub fn flag_name(&self) -> Option<String> {
        match self.flag {
            Flag::None => None,
            Flag::Same => Some(self.name.replace('_', "-")),
            Flag::Named(name) => Some(name.to_owned()),
        }
    }

    /// The value of its flag without a value. `None`: the flag needs a value.
    #[must_use]
    pub fn bare_value(&self) -> Option<&'static str> {
        match self.rule {
            Rule::Flag => Some("true"),
            _ => Some(self.bare).filter(|bare| !bare.is_empty()),
        }
    }

    /// A second name of its flag.
    #[must_use]
    pub fn flag_alias(&self) -> Option<String> {
        match self.flag {
            // A flag of a list names one item.
            Flag::Named(name) if !self.name.starts_with(&name.replace('-', "_")) => {
                Some(self.name.replace('_', "-"))
            }
            _ => None,
        }
    }

    /// The description: paragraphs, without line breaks. Names of keys are between backticks.
    #[must_use]
    pub fn paragraphs(&self) -> Vec<String> {
        let mut all = vec![String::new()];
        for line in self.text.lines().map(str::trim) {
            let last = all.len() - 1;
            if line.is_empty() {
                all.push(String::new());
            } else if all[last].is_empty() {
                line.clone_into(&mut all[last]);
            } else {
                all[last] = format!("{} {line}", all[last]);
            }
        }
        all.retain(|paragraph| !paragraph.is_empty());
        all
    }

    /// The description for a terminal or a file: without backticks around single words.
    #[must_use]
    pub fn plain_paragraphs(&self) -> Vec<String> {
        self.paragraphs().iter().map(|paragraph| without_ticks(paragraph)).collect()
    }
}

impl Schema {
    /// The keys, in the order of the examples.
    pub fn keys(&self) -> impl Iterator<Item = &'static Key> + use<> {
        self.entries.iter().flat_map(|entry| match entry.rule {
            Rule::Keys(inner) => inner.entries,
            _ => std::slice::from_ref(entry),
        })
    }

    /// The key of a name.
    #[must_use]
    pub fn key(&self, name: &str) -> Option<&'static Key> {
        self.keys().find(|key| key.name == name)
    }

    /// The default of a key, as it stands in a file. `None` without one.
    #[must_use]
    pub fn default_of(&self, key: &Key) -> Option<Value> {
        if key.required { None } else { (self.defaults)().remove(key.name) }
    }

    /// The keys of former versions, which have no effect any more.
    #[must_use]
    pub fn retired(&self) -> &'static [RetiredKey] {
        self.retired
    }

    /// Adds the faults of a table to `faults`. `path` is the path of the table, empty for a file.
    pub(crate) fn judge(&self, path: &str, table: &Table, faults: &mut Vec<Fault>) {
        for (name, value) in table {
            match self.key(name) {
                Some(key) => key.rule.judge(&join(path, name), value, faults),
                None if self.retired.iter().any(|retired| retired.name == name) => {}
                None => faults.push(self.unknown(path, name)),
            }
        }
        for key in self.keys().filter(|key| key.required && !table.contains_key(key.name)) {
            faults.push(Fault::new(join(path, key.name), "missing", key.rule.fix()));
        }
    }

    fn unknown(&self, path: &str, name: &str) -> Fault {
        let known: Vec<_> = self.keys().map(|key| key.name).collect();
        let fix = match nearest(name, known.iter().copied()) {
            Some(near) => format!("did you mean {near}?"),
            None => format!("the known keys are {}", known.join(", ")),
        };
        Fault::new(join(path, name), "unknown key", fix).at_key()
    }
}

impl RetiredKey {
    /// The warning for a file that has the key.
    pub(crate) fn warning(&self) -> String {
        let Self { name, since, now } = self;
        format!("{name} has no effect since version {since}: {now}; remove the line")
    }
}

/// A type of the values of keys.
pub(crate) trait KeyValue {
    /// Whether no file names the value.
    fn is_absent(&self) -> bool {
        false
    }
}

impl<T> KeyValue for Option<T> {
    fn is_absent(&self) -> bool {
        self.is_none()
    }
}

impl<T> KeyValue for Vec<T> {
    fn is_absent(&self) -> bool {
        self.is_empty()
    }
}

/// Makes these types values of keys.
macro_rules! key_values {
    ($($type:ty),+ $(,)?) => {
        $(impl $crate::schema::key_table::KeyValue for $type {})+
    };
}

key_values!(
    bool,
    u16,
    u32,
    String,
    std::path::PathBuf,
    crate::ByteSize,
    Duration,
    crate::Spin,
    crate::DigestWish,
    crate::OnLoss,
    crate::Encrypt,
    crate::HugePages,
    crate::StoreKind,
    crate::DirectIo,
);

/// The text without backticks around single words.
fn without_ticks(text: &str) -> String {
    let mut plain = String::new();
    let mut parts = text.split('`');
    plain.push_str(parts.next().unwrap_or_default());
    while let Some(quoted) = parts.next() {
        let tick = if quoted.contains(' ') { "`" } else { "" };
        plain.push_str(&format!("{tick}{quoted}{tick}"));
        plain.push_str(parts.next().unwrap_or_default());
    }
    plain
}

/// Makes a configuration type of its keys: the type, its defaults, and its [`Schema`].
///
/// A field has its description, its type, its default, and behind `=>` its [`Key`]. `extra` gives
/// the type further attributes.
macro_rules! key_table {
    (
        $(#[doc = $about:literal])+
        $(#[extra($($extra:meta),+)])?
        pub struct $type:ident in $schema:ident {
            $(
                $(#[doc = $doc:literal])+
                $(#[serde($($serde:tt)+)])?
                pub $field:ident: $value:ty = $default:expr => $key:expr;
            )+
        }
        $(retired { $($retired:expr),+ $(,)? })?
    ) => {
        $(#[doc = $about])+
        #[derive(Clone, PartialEq, Eq, Debug, serde::Serialize, serde::Deserialize)]
        #[serde(default)]
        $($(#[$extra])+)?
        pub struct $type {
            $(
                $(#[doc = $doc])+
                $(#[serde($($serde)+)])?
                #[serde(skip_serializing_if = "crate::schema::key_table::KeyValue::is_absent")]
                pub $field: $value,
            )+
        }

        impl Default for $type {
            /// The defaults of the keys. A required key has an empty value.
            fn default() -> Self {
                Self { $($field: $default),+ }
            }
        }

        $crate::schema::key_table::key_values!($type);

        pub(crate) static $schema: $crate::schema::key_table::Schema =
            $crate::schema::key_table::Schema {
                entries: &[$($key.described(stringify!($field), concat!($($doc, "\n"),+))),+],
                defaults: || toml::Table::try_from(<$type>::default()).unwrap_or_default(),
                retired: &[$($($retired),+)?],
            };
    };
}

pub(crate) use {key_table, key_values};

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{HostConfig, MountConfig, TargetConfig, VolumeConfig};

    #[test]
    fn every_key_is_described_and_has_a_default_or_a_meaning_of_its_absence() {
        let tables =
            [TargetConfig::keys(), VolumeConfig::keys(), HostConfig::keys(), MountConfig::keys()];
        for schema in tables {
            for key in schema.keys() {
                let name = key.name;
                assert!(!key.paragraphs().is_empty(), "{name}");
                let is_table = matches!(key.rule, Rule::Tables(_));
                let has_default = schema.default_of(key).is_some();
                assert_eq!(has_default, key.example.is_empty() && !is_table, "{name}: example");
                assert_eq!(has_default || key.required, key.absent.is_empty(), "{name}: absent");
            }
        }
    }

    #[test]
    fn backticks_stay_around_commands() {
        let text = "see `max_io`, and `rblk-target key new`.";
        assert_eq!(without_ticks(text), "see max_io, and `rblk-target key new`.");
    }
}
