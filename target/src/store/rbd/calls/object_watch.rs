//! [`KeptWatch`]: a watch of an object, by which other clients of the cluster reach this one. A
//! watch that is broken, or cannot begin, is tried again.

use std::ffi::{c_int, c_void};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::{Duration, Instant};

use nix::errno::Errno;

use crate::store::rbd::cluster::checked;
use crate::store::rbd::owner_question::{AskTicket, receive};
use crate::store::rbd::state_object::StateObject;

/// Seconds after which the cluster forgets the watch of a client that it does not hear of.
const WATCH_SECONDS: u32 = 30;
/// Time between two tries to begin a watch.
const WATCH_RETRY: Duration = Duration::from_secs(3);

/// News of a watch. A thread of librados tells them.
#[derive(Debug)]
pub(in crate::store::rbd) enum WatchNews {
    /// Another client sends a notice.
    Notice(AskTicket, Vec<u8>),
    /// The watch is broken.
    Broken,
}

/// Takes the news of a watch.
pub(in crate::store::rbd) type OnNews = Arc<dyn Fn(WatchNews) + Send + Sync>;

/// What a thread with a watch does next.
#[derive(PartialEq, Eq, Debug)]
pub(in crate::store::rbd) enum NextDue<T> {
    Order(T),
    Watch,
    // Nobody gives orders any more.
    End,
}

/// Waits for an order, or until a try to watch is due. Orders that come one after the other do not
/// delay that.
pub(in crate::store::rbd) fn next_due<T>(
    orders: &Receiver<T>,
    watch_at: Option<Instant>,
) -> NextDue<T> {
    let Some(at) = watch_at else { return orders.recv().map_or(NextDue::End, NextDue::Order) };
    let left = at.saturating_duration_since(Instant::now());
    if left.is_zero() {
        return NextDue::Watch;
    }
    match orders.recv_timeout(left) {
        Ok(order) => NextDue::Order(order),
        Err(RecvTimeoutError::Timeout) => NextDue::Watch,
        Err(RecvTimeoutError::Disconnected) => NextDue::End,
    }
}

/// See the module. The drop ends the watch.
pub(in crate::store::rbd) struct KeptWatch<'o> {
    object: &'o StateObject,
    on_news: OnNews,
    // The harm while there is no watch, for people.
    harm: &'static str,
    watch: Option<Watch<'o>>,
    // When the next try is due, if there is no watch.
    again_at: Option<Instant>,
    // A try has failed since the last watch.
    is_unheard: bool,
}

impl<'o> KeptWatch<'o> {
    /// A watch that begins now, or is tried again.
    pub(in crate::store::rbd) fn begin(
        object: &'o StateObject,
        harm: &'static str,
        on_news: OnNews,
    ) -> Self {
        let mut kept =
            Self { object, on_news, harm, watch: None, again_at: None, is_unheard: false };
        kept.again();
        kept
    }

    /// When the next try is due, if there is no watch.
    pub(in crate::store::rbd) fn again_at(&self) -> Option<Instant> {
        self.again_at
    }

    /// Begins the watch anew, and says so once if that fails.
    pub(in crate::store::rbd) fn again(&mut self) {
        self.watch = None;
        let object = self.object.name();
        match Watch::begin(self.object, Arc::clone(&self.on_news)) {
            Ok(watch) => {
                (self.watch, self.again_at) = (Some(watch), None);
                if std::mem::take(&mut self.is_unheard) {
                    tracing::info!(object, "other members can ask this one again");
                }
            }
            Err(errno) => {
                self.again_at = Some(Instant::now() + WATCH_RETRY);
                if !std::mem::replace(&mut self.is_unheard, true) {
                    let harm = self.harm;
                    tracing::warn!(object, %errno, "{harm}; this one tries again every few seconds");
                }
            }
        }
    }
}

/// A watch. The drop ends it.
struct Watch<'o> {
    object: &'o StateObject,
    number: u64,
    argument: *mut OnNews,
}

impl<'o> Watch<'o> {
    fn begin(object: &'o StateObject, on_news: OnNews) -> Result<Self, Errno> {
        let argument = Box::into_raw(Box::new(on_news));
        let mut number = 0;
        // SAFETY: an open pool; the argument lives until the watch has ended.
        let watched = checked(unsafe {
            (object.library().rados_watch3)(
                object.pool(),
                object.object().as_ptr(),
                &raw mut number,
                on_notice,
                on_broken,
                WATCH_SECONDS,
                argument.cast(),
            )
        });
        match watched {
            Ok(_) => Ok(Self { object, number, argument }),
            Err(errno) => {
                // SAFETY: made above; no watch has it.
                drop(unsafe { Box::from_raw(argument) });
                Err(errno)
            }
        }
    }
}

impl Drop for Watch<'_> {
    fn drop(&mut self) {
        // SAFETY: the watch is its own.
        let ended =
            unsafe { (self.object.library().rados_unwatch2)(self.object.pool(), self.number) };
        if checked(ended).is_ok() {
            self.object.flush_watches();
            // SAFETY: made by `Box::into_raw`; no callback runs after the end of the watch.
            drop(unsafe { Box::from_raw(self.argument) });
        }
    }
}

unsafe extern "C" fn on_notice(
    argument: *mut c_void,
    notice: u64,
    watch: u64,
    _: u64,
    data: *mut c_void,
    len: usize,
) {
    // SAFETY: the argument of the watch, which lives as long as the watch.
    let on_news = unsafe { &*argument.cast::<OnNews>() };
    // SAFETY: librados gives so many bytes for the time of the call.
    let text = unsafe { receive(data, len) };
    on_news(WatchNews::Notice(AskTicket { notice, watch }, text));
}

unsafe extern "C" fn on_broken(argument: *mut c_void, _: u64, errno: c_int) {
    // SAFETY: the argument of the watch, which lives as long as the watch.
    let on_news = unsafe { &*argument.cast::<OnNews>() };
    on_news(WatchNews::Broken);
    // The looks at the lock find out whether the image is lost.
    let errno = Errno::from_raw(errno.wrapping_neg());
    tracing::warn!(%errno, "a watch at the cluster is broken: other members cannot ask this one by it");
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    #[test]
    fn orders_do_not_delay_a_try_to_watch() {
        let (give, orders) = mpsc::channel();
        (0..3).for_each(|order| give.send(order).unwrap());
        let now = Instant::now();
        assert_eq!(next_due(&orders, Some(now)), NextDue::Watch);
        assert_eq!(next_due(&orders, Some(now + Duration::from_secs(3600))), NextDue::Order(0));
        assert_eq!(next_due(&orders, None), NextDue::Order(1));
        assert_eq!(next_due(&orders, Some(now)), NextDue::Watch, "an order waits");
        assert_eq!(next_due(&orders, None), NextDue::Order(2));
        assert_eq!(
            next_due(&orders, Some(Instant::now() + Duration::from_millis(1))),
            NextDue::Watch
        );
        drop(give);
        assert_eq!(next_due(&orders, None), NextDue::End);
        assert_eq!(next_due(&orders, Some(now + Duration::from_secs(3600))), NextDue::End);
    }
}
