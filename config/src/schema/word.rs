//! `words!`: types with words of a configuration as values, such as `cache = "write-back"`.
//!
//! One list of variants and words makes the words of the schema, [`Display`](std::fmt::Display),
//! [`FromStr`](std::str::FromStr), `Serialize` and `Deserialize`, so these agree.

/// Makes a type of these variants and words. Its `FromStr` fails with `$error`, made of the text by
/// `$refuse`.
macro_rules! words {
    ($type:ident, $error:ty, $refuse:expr, { $($variant:ident = $word:literal),+ $(,)? }) => {
        impl $type {
            /// The words of a configuration.
            pub(crate) const WORDS: &'static [&'static str] = &[$($word),+];

            /// The word of a configuration.
            #[must_use]
            pub const fn word(self) -> &'static str {
                match self {
                    $(Self::$variant => $word),+
                }
            }
        }

        impl std::fmt::Display for $type {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.pad(self.word())
            }
        }

        impl std::str::FromStr for $type {
            type Err = $error;

            fn from_str(text: &str) -> Result<Self, $error> {
                match text {
                    $($word => Ok(Self::$variant),)+
                    _ => Err($refuse(text)),
                }
            }
        }

        impl serde::Serialize for $type {
            fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                serializer.serialize_str(self.word())
            }
        }

        impl<'de> serde::Deserialize<'de> for $type {
            fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                let text = std::borrow::Cow::<'de, str>::deserialize(deserializer)?;
                text.parse().map_err(serde::de::Error::custom)
            }
        }
    };
    // The error says which words there are.
    ($type:ident, { $($variant:ident = $word:literal),+ $(,)? }) => {
        $crate::schema::word::words!(
            $type,
            String,
            |_| $crate::schema::rule::Rule::Word($type::WORDS).fix(),
            { $($variant = $word),+ }
        );
    };
}

pub(crate) use words;
