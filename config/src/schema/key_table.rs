//! `key_table!`: makes the type of a configuration, its defaults and its schema of one description
//! of each key. [`KeyValue`]: the types of values.
//!
//! The parser of files, the flags of commands, their help, the reference in docs/keys.md and the
//! example files follow from this description.

use crate::units::Duration;

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
    crate::Paths,
    crate::Encrypt,
);

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

        pub(crate) static $schema: $crate::schema::rule::Schema =
            $crate::schema::rule::Schema {
                entries: &[$($key.described(stringify!($field), concat!($($doc, "\n"),+))),+],
                defaults: || toml::Table::try_from(<$type>::default()).unwrap_or_default(),
                retired: &[$($($retired),+)?],
            };
    };
}

pub(crate) use {key_table, key_values};
