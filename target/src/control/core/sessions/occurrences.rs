//! The occurrences of a session, for the log of events.

use std::time::Duration;

use rblk_operate::target::events::{EventKind, Occurrence};
use rblk_protocol::{Epoch, Name};

use crate::control::peers::session::Session;

/// The LOGIN of a session was answered.
pub(super) fn logged_in(session: &Session) -> Occurrence {
    let what = match session.epoch {
        Epoch(1) => Occurrence::new(EventKind::Connect, "the host began a session"),
        Epoch(epoch) => Occurrence::new(
            EventKind::Resume,
            format!("the host came back to its session, in epoch {epoch}"),
        ),
    };
    what.of_host(session.host_name, &session.peer)
}

/// The admin connection of an epoch of a session is gone. The session holds the volumes of these
/// names for the lease. `None`: that is no loss, since the session is ending, or its host is back
/// in a newer epoch.
pub(super) fn admin_gone(
    session: &Session,
    epoch: Epoch,
    held: &str,
    lease: Duration,
) -> Option<Occurrence> {
    let is_lost = session.leave().is_none() && session.logged_in && session.epoch == epoch;
    if !is_lost {
        return None;
    }
    let lease = in_words(lease);
    // A host that was refused its volume leaves without a LOGOUT.
    let what = match held.is_empty() {
        true => Occurrence::new(EventKind::Leave, "the host left; it held no volume"),
        false => {
            let text = format!("the host lost its connections; it keeps {held} for {lease}");
            Occurrence::new(EventKind::Loss, text)
        }
    };
    Some(what.of_host(session.host_name, &session.peer))
}

/// A host reached a limit and wanted more.
pub(in crate::control::core) fn wanted_more(host: Name, peer: &str, why: &str) -> Occurrence {
    let what = Occurrence::new(EventKind::Refuse, format!("the host wanted more: {why}"));
    what.of_host(host, peer)
}

/// A host logs out.
pub(in crate::control::core) fn logged_out(session: &Session) -> Occurrence {
    let what = Occurrence::new(EventKind::Leave, "the host ended its session");
    what.of_host(session.host_name, &session.peer)
}

/// The key of a host is not allowed any more.
pub(in crate::control::core) fn revoked(session: &Session) -> Occurrence {
    let what = Occurrence::new(EventKind::Revoke, "the key of the host is not allowed any more");
    what.of_host(session.host_name, &session.peer)
}

/// The lease of a lost session ended. It held the volumes of these names.
pub(super) fn expired(session: &Session, held: &str) -> Occurrence {
    let text = format!("the lease of the lost session ended: {held} is free");
    Occurrence::new(EventKind::Expire, text).of_host(session.host_name, &session.peer)
}

/// A time for people: in whole seconds, from one second on.
fn in_words(time: Duration) -> String {
    match time.as_secs() {
        0 => format!("{} ms", time.as_millis()),
        seconds => format!("{seconds} s"),
    }
}
