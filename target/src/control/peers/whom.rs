//! [`meant`]: the sessions that an order names, by a host, a peer or a number. Pure.

use crate::control::peers::account::address_of;
use crate::control::peers::session::Session;

/// The selection of an order.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Whom<'a> {
    /// The sessions of the host or the peer of this name, or the session of this number.
    Any(&'a str),
    /// The sessions of the host or the peer of this name.
    Host(&'a str),
    /// The session of this number.
    Number(&'a str),
}

impl<'a> Whom<'a> {
    /// Parses the words of an order.
    fn of(text: &'a str) -> Self {
        match text.split_once(':') {
            Some(("host", name)) => Self::Host(name),
            Some(("number", number)) => Self::Number(number),
            _ => Self::Any(text),
        }
    }

    fn is_host_or_peer(self, session: &Session) -> bool {
        let (Self::Any(whom) | Self::Host(whom)) = self else { return false };
        // By whichever way the host comes.
        let is_it = |peer: &str| peer == whom || address_of(peer) == whom;
        session.host_name.as_str() == whom || is_it(&session.peer) || session.peers().any(is_it)
    }

    fn is_number(self, session: &Session) -> bool {
        let (Self::Any(whom) | Self::Number(whom)) = self else { return false };
        session.index.life.to_string() == whom
    }
}

/// The sessions that an order selects: those of a host or a peer, or the one of a number.
///
/// # Errors
/// A host has the name, and a session of another host has the number.
pub(in crate::control) fn meant<'s>(
    sessions: impl Iterator<Item = &'s Session>,
    text: &str,
) -> Result<Vec<&'s Session>, String> {
    let whom = Whom::of(text);
    let (named, others): (Vec<_>, Vec<_>) =
        sessions.partition(|session| whom.is_host_or_peer(session));
    let numbered: Vec<_> = others.into_iter().filter(|session| whom.is_number(session)).collect();
    match (named.is_empty(), numbered.is_empty()) {
        (true, _) => Ok(numbered),
        (false, true) => Ok(named),
        (false, false) => Err(format!(
            "{text} is the name of a host and the number of a session of another host: write \
             host:{text} or number:{text}"
        )),
    }
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use rblk_protocol::{Epoch, HostId, Join, Name, SessionId};

    use super::*;
    use crate::control::peers::account::Payer;
    use crate::control::peers::session::{LoggingIn, SessionTable};

    #[test]
    fn a_name_that_is_also_a_number_is_refused_as_ambiguous() {
        let mut table = SessionTable::new(8, Duration::from_secs(30));
        // Sessions 1 to 4. The host `3` has the second one, and the host `4` the fourth.
        for (number, host) in (1..).zip(["a", "3", "a", "4"]) {
            let login = LoggingIn {
                host: HostId([number; 16]),
                account: Payer::Host(HostId([number; 16])),
                host_name: Name::new(host).unwrap(),
                detect: Duration::from_secs(5),
                peer: format!("tcp://192.0.2.{number}:5000"),
                has_ways: false,
            };
            table.begin(SessionId([number; 16]), login, Instant::now()).unwrap();
        }
        // One more way of the first.
        let second = LoggingIn {
            host: HostId([1; 16]),
            account: Payer::Host(HostId([1; 16])),
            host_name: Name::new("a").unwrap(),
            detect: Duration::from_secs(5),
            peer: "tcp://198.51.100.1:5000".to_owned(),
            has_ways: true,
        };
        let join = Join { beside: Epoch(1), ends: None };
        table.add_way(SessionId([1; 16]), Epoch(2), join, second).unwrap();
        let numbers = |text: &str| {
            let meant = meant(table.iter(), text)?;
            Ok::<_, String>(meant.iter().map(|session| session.index.life).collect::<Vec<_>>())
        };
        assert_eq!(numbers("a"), Ok(vec![1, 3]));
        assert_eq!(numbers("tcp://192.0.2.1"), Ok(vec![1]), "by its first way");
        assert_eq!(numbers("tcp://198.51.100.1"), Ok(vec![1]), "by its second");
        assert_eq!(numbers("tcp://192.0.2.3"), Ok(vec![3]));
        assert_eq!(numbers("1"), Ok(vec![1]));
        assert_eq!(numbers("4"), Ok(vec![4]), "it is the same session");
        assert_eq!(numbers("9"), Ok(vec![]));
        let asked = numbers("3").unwrap_err();
        assert!(asked.contains("write host:3 or number:3"), "{asked}");
        assert_eq!((numbers("host:3"), numbers("number:3")), (Ok(vec![2]), Ok(vec![3])));
        assert_eq!((numbers("host:1"), numbers("number:a")), (Ok(vec![]), Ok(vec![])));
    }
}
