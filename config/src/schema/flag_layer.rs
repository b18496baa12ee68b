//! [`FlagLayer`]: the values that a command line gives keys, over those of the files. A value of a
//! flag has the rule and the error of its key.

use serde::Serialize;
use serde::de::DeserializeOwned;
use toml::{Table, Value};

use crate::error::ConfigError;
use crate::schema::rule::Key;
use crate::schema::rule::Rule;

/// Values of flags.
#[derive(Clone, Debug, Default)]
pub struct FlagLayer {
    values: Vec<FlagValue>,
}

/// The value that a flag gives a key.
#[derive(Clone, Debug)]
pub(crate) struct FlagValue {
    /// The name of the key.
    pub(crate) key: &'static str,
    /// The flag, for messages. `None` where the path of the key says more.
    pub(crate) flag: Option<String>,
    /// The value.
    pub(crate) effect: FlagEffect,
}

/// The effect of a flag on its key.
#[derive(Clone, Debug)]
pub(crate) enum FlagEffect {
    /// The key gets this value.
    Value(Value),
    /// The key has no value.
    Nothing,
    /// The list of the key gets these items, too.
    Items(Vec<Value>),
    /// A host gets this public key, too, or is added.
    HostKey {
        /// The name of the host.
        name: String,
        /// The key.
        key: String,
    },
}

impl FlagLayer {
    /// Gives a key the value of a flag such as `--max-io`: the one text, or the texts of a list.
    pub fn set<'t>(
        &mut self,
        key: &'static Key,
        flag: &str,
        texts: impl IntoIterator<Item = &'t str>,
    ) {
        let mut texts = texts.into_iter();
        let value = match key.rule {
            Rule::List { item, .. } => {
                Value::Array(texts.map(|text| item.value_of(text)).collect())
            }
            rule => rule.value_of(texts.next().unwrap_or_default()),
        };
        self.push(key.name, Some(flag.to_owned()), FlagEffect::Value(value));
    }

    /// Gives a key the value of an argument without a flag.
    pub fn set_argument(&mut self, key: &'static str, value: impl Into<Value>) {
        self.push(key, None, FlagEffect::Value(value.into()));
    }

    /// Takes the value of a key away.
    pub fn clear(&mut self, key: &'static Key) {
        self.push(key.name, None, FlagEffect::Nothing);
    }

    /// Adds items to the list of a key.
    pub fn extend(&mut self, key: &'static str, flag: &str, items: &[String]) {
        let items: Vec<Value> = items.iter().cloned().map(Value::String).collect();
        if !items.is_empty() {
            self.push(key, Some(flag.to_owned()), FlagEffect::Items(items));
        }
    }

    /// Adds a volume, a [`VolumeConfig`](crate::VolumeConfig).
    ///
    /// # Errors
    /// [`ConfigError::Dump`] if its path is not UTF-8.
    pub fn add_volume(&mut self, volume: &impl Serialize) -> Result<(), ConfigError> {
        let table =
            Table::try_from(volume).map_err(|error| ConfigError::Dump(error.to_string()))?;
        self.push("volume", None, FlagEffect::Items(vec![Value::Table(table)]));
        Ok(())
    }

    /// Adds a host that may open every volume, or a key of a host of the files.
    pub fn add_host(&mut self, name: &str, key: &str) {
        let (name, key) = (name.to_owned(), key.to_owned());
        self.push("host", None, FlagEffect::HostKey { name, key });
    }

    /// Adds all values of another command's flags.
    pub fn append(&mut self, other: &Self) {
        self.values.extend(other.values.iter().cloned());
    }

    /// Whether a flag gave the key a value.
    #[must_use]
    pub fn has(&self, key: &str) -> bool {
        self.values.iter().any(|value| value.key == key)
    }

    pub(crate) fn values(&self) -> &[FlagValue] {
        &self.values
    }

    fn push(&mut self, key: &'static str, flag: Option<String>, effect: FlagEffect) {
        self.values.push(FlagValue { key, flag, effect });
    }
}

/// A configuration whose keys flags can set.
pub trait Flagged: Serialize + DeserializeOwned {
    /// The keys.
    fn schema() -> &'static crate::Schema;
}
