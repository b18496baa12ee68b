//! [`Spin`]: how long a data thread looks for work before it sleeps.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Deserializer, Serialize, Serializer, de};

use crate::units::{Duration, DurationError};

/// How long a data thread looks for work before it sleeps: `"adaptive"`, `"always"`, or a time.
///
/// ```
/// use rblk_config::{Duration, Spin};
///
/// assert_eq!("adaptive".parse(), Ok(Spin::Adaptive));
/// assert_eq!("50us".parse(), Ok(Spin::For(Duration::from_micros(50))));
/// assert_eq!(Spin::Always.to_string(), "always");
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub enum Spin {
    /// As long as looking saved more time than it cost lately, at most 1 ms.
    #[default]
    Adaptive,
    /// The thread does not sleep while it is connected.
    Always,
    /// For this time. Zero sleeps at once.
    For(Duration),
}

impl FromStr for Spin {
    type Err = DurationError;

    fn from_str(text: &str) -> Result<Self, DurationError> {
        match text.trim() {
            "adaptive" => Ok(Self::Adaptive),
            "always" => Ok(Self::Always),
            time => time.parse().map(Self::For),
        }
    }
}

impl fmt::Display for Spin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Adaptive => f.pad("adaptive"),
            Self::Always => f.pad("always"),
            Self::For(time) => time.fmt(f),
        }
    }
}

impl Serialize for Spin {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Spin {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = std::borrow::Cow::<'de, str>::deserialize(deserializer)?;
        text.parse().map_err(de::Error::custom)
    }
}
