//! [`OnLoss`]: which FLUSHes of a mount fail after acknowledged writes may be lost.
//!
//! The default is [`OnLoss::UntilRemount`]. One disk may have several users: two file systems on
//! two partitions, or a database beside a file system. Only the user that sent a FLUSH learns that
//! it failed. If the next FLUSH succeeds, every other user believes that lost writes are durable.
//! File systems stop at the first FLUSH that fails and must be mounted again anyway, so the default
//! costs them nothing.

use crate::schema::word::words;

/// Which FLUSHes of a mount fail (EIO) after acknowledged writes may be lost: `"until-remount"` or
/// `"once"`. The greater value fails more FLUSHes.
///
/// ```
/// use rblk_config::OnLoss;
///
/// assert_eq!("once".parse(), Ok(OnLoss::Once));
/// assert_eq!(OnLoss::default(), OnLoss::UntilRemount);
/// assert_eq!(OnLoss::UntilRemount.to_string(), "until-remount");
/// ```
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
pub enum OnLoss {
    /// The FLUSHes that waited when the writes were lost, or the next FLUSH. For a disk with one
    /// user that handles a failed FLUSH by itself.
    Once,
    /// Every FLUSH after the loss, until the disk is unmounted and mounted again. So every user of
    /// the disk learns of the loss.
    #[default]
    UntilRemount,
}

/// A text that is not an [`OnLoss`].
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("\"{0}\" is neither \"once\" nor \"until-remount\"")]
pub struct OnLossError(String);

words!(OnLoss, OnLossError, |text: &str| OnLossError(text.to_owned()), {
    Once = "once",
    UntilRemount = "until-remount",
});

impl OnLoss {
    /// Which FLUSHes fail after a loss, in the words of the log and of `list`.
    #[must_use]
    pub fn consequence(self) -> &'static str {
        match self {
            Self::Once => "the next FLUSH fails with EIO",
            Self::UntilRemount => "every FLUSH fails until the disk is unmounted and mounted again",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_schema_and_the_type_have_the_same_words() {
        for word in OnLoss::WORDS {
            assert_eq!(word.parse::<OnLoss>().unwrap().to_string(), *word);
        }
        assert_eq!(OnLoss::WORDS.len(), 2);
        let error = "twice".parse::<OnLoss>().unwrap_err().to_string();
        assert_eq!(error, "\"twice\" is neither \"once\" nor \"until-remount\"");
        assert!("Once".parse::<OnLoss>().is_err());
    }
}
