//! [`Paths`]: how a mount uses several addresses of its target.

use crate::schema::word::words;

/// How a mount uses several addresses of its target: `"failover"` or `"all"`.
///
/// ```
/// use rblk_config::Paths;
///
/// assert_eq!("all".parse(), Ok(Paths::All));
/// assert_eq!(Paths::default(), Paths::Failover);
/// assert_eq!(Paths::All.to_string(), "all");
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub enum Paths {
    /// One at a time.
    #[default]
    Failover,
    /// All at once.
    All,
}

/// A text that is no [`Paths`].
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("\"{0}\" is neither \"failover\" nor \"all\"")]
pub struct PathsError(String);

words!(Paths, PathsError, |text: &str| PathsError(text.to_owned()), {
    Failover = "failover",
    All = "all",
});

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_schema_and_the_type_have_the_same_words() {
        for word in Paths::WORDS {
            assert_eq!(word.parse::<Paths>().unwrap().to_string(), *word);
        }
        assert_eq!(Paths::WORDS.len(), 2);
        let error = "both".parse::<Paths>().unwrap_err().to_string();
        assert_eq!(error, "\"both\" is neither \"failover\" nor \"all\"");
    }
}
