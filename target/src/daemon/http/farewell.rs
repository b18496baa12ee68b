//! [`Farewell`]: the last word of a target to the pages that are open. A page asks for it and
//! waits: a target that crashes says nothing, so a page can tell a crash from an end.

use std::sync::Arc;
use std::time::Duration;

use serde::Serialize;
use tokio::sync::{Semaphore, watch};

/// How long a page waits for the answer; then it hears that the target goes on. Shorter than the
/// life of a connection.
const WAIT: Duration = Duration::from_secs(25);
/// Pages that wait at a time. Others are answered at once, and ask again.
const WAITING_MAX: usize = 16;

/// How long the end of a target waits for the pages that hear its last word.
const HEARD_TIME: Duration = Duration::from_millis(250);

/// How a target ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Ending {
    /// Every initiator had left, and no acknowledged data is lost.
    Drained,
    /// The target stopped, though initiators had not left or stores did not take everything.
    Stopped,
    /// Another program takes its place.
    Upgraded,
    /// Something broke.
    Failed,
}

/// The last word of a target.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub(crate) struct Farewell {
    /// How it ended.
    pub(crate) end: Ending,
    /// The end in words.
    pub(crate) text: String,
}

/// The listeners of the last word.
#[derive(Clone, Debug)]
pub(super) struct Ears {
    word: watch::Receiver<Option<Farewell>>,
    wait: Duration,
    places: Arc<Semaphore>,
}

impl Ears {
    /// The listeners of a target that goes on.
    pub(super) fn new(word: watch::Receiver<Option<Farewell>>) -> Self {
        Self { word, wait: WAIT, places: Arc::new(Semaphore::new(WAITING_MAX)) }
    }

    /// Waits for the last word; `None`: the target goes on.
    pub(super) async fn hear(&self) -> Option<Farewell> {
        let _place = self.places.try_acquire().ok()?;
        tokio::time::timeout(self.wait, self.last()).await.ok().flatten()
    }

    /// Returns when the last word is said and every page that waited for it has it. A connection
    /// writes an answer in the turn in which it is made.
    pub(super) async fn have_heard(&self) {
        let _ = self.last().await;
        let all = u32::try_from(WAITING_MAX).unwrap_or(u32::MAX);
        let _ = tokio::time::timeout(HEARD_TIME, self.places.acquire_many(all)).await;
    }

    /// The last word; `None`: there will be none.
    pub(super) async fn last(&self) -> Option<Farewell> {
        let mut word = self.word.clone();
        let said = word.wait_for(Option::is_some).await.ok()?;
        said.clone()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_waiting_page_hears_the_last_word_or_none() {
        let (say, word) = watch::channel(None);
        let mut ears = Ears::new(word);
        ears.wait = Duration::from_millis(1);
        assert_eq!(ears.hear().await, None, "it goes on");
        ears.wait = WAIT;
        let waiting: Vec<_> = (0..WAITING_MAX)
            .map(|_| {
                let ears = ears.clone();
                tokio::spawn(async move { ears.hear().await })
            })
            .collect();
        tokio::task::yield_now().await;
        assert_eq!(ears.hear().await, None, "there is no place, and nobody waits for one");
        let farewell = Farewell { end: Ending::Drained, text: "it drained".to_owned() };
        say.send(Some(farewell.clone())).unwrap();
        ears.have_heard().await;
        assert!(waiting.iter().all(tokio::task::JoinHandle::is_finished));
        for waiting in waiting {
            assert_eq!(waiting.await.unwrap(), Some(farewell.clone()));
        }
        assert_eq!(ears.hear().await, Some(farewell.clone()), "who asks late hears it, too");
        let json = serde_json::to_string(&farewell).unwrap();
        assert_eq!(json, r#"{"end":"drained","text":"it drained"}"#);
    }

    #[tokio::test]
    async fn a_crashed_target_has_no_last_word() {
        let (say, word) = watch::channel(None);
        drop(say);
        assert_eq!(Ears::new(word).hear().await, None);
    }
}
