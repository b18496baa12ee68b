//! The occurrences of a session, for the log of events.

use std::time::Duration;

use rblk_operate::target::events::{EventKind, Occurrence};
use rblk_protocol::{DropRequest, Epoch, Name};

use crate::control::peers::session::{Session, Way};

/// The LOGIN of an epoch of a session was answered.
pub(super) fn logged_in(session: &Session, epoch: Epoch) -> Occurrence {
    let what = match epoch {
        Epoch(epoch) if session.way(Epoch(epoch)).is_some_and(Way::has_joined) => Occurrence::new(
            EventKind::Connect,
            format!("the host has one more way to its session, in epoch {epoch}"),
        ),
        Epoch(1) => Occurrence::new(EventKind::Connect, "the host began a session"),
        Epoch(epoch) => Occurrence::new(
            EventKind::Resume,
            format!("the host came back to its session, in epoch {epoch}"),
        ),
    };
    what.of_host(session.host_name, &session.peer)
}

/// The admin connection of an epoch of a session is gone. The session holds the volumes of these
/// names for the lease. `None`: that is no loss, since the session is ending, or the epoch ended.
pub(super) fn admin_gone(
    session: &Session,
    epoch: Epoch,
    held: &str,
    lease: Duration,
) -> Option<Occurrence> {
    let is_lost = session.leave().is_none() && session.is_in(epoch);
    if !is_lost {
        return None;
    }
    if session.has_other_admin(epoch) {
        let text = format!("the host lost a way to its session, in epoch {}", epoch.0);
        let what = Occurrence::new(EventKind::Loss, text);
        return Some(what.of_host(session.host_name, &session.peer));
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

/// A host gives ways up. It may know of their end before the target does.
pub(super) fn dropped(session: &Session, request: &DropRequest) -> Occurrence {
    let epochs: Vec<String> = request.epochs().iter().map(|epoch| epoch.0.to_string()).collect();
    let text = format!("the host gave up what it sent in epoch {}", epochs.join(", "));
    Occurrence::new(EventKind::Leave, text).of_host(session.host_name, &session.peer)
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
