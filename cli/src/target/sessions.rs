//! `rblk-target session`: the sessions of the running target.

use rblk_config::Exit;
use rblk_operate::Output;
use rblk_operate::target::ask::{Ask, Response};
use rblk_operate::target::flags::SessionCommand;
use rblk_operate::target::status::SessionStatus;

use crate::target::running::{asked, not_understood, socket_of, status_of};

/// Carries out a command.
pub(crate) fn session(command: &SessionCommand, output: Output) -> anyhow::Result<Exit> {
    match command {
        SessionCommand::List(running) => {
            let sessions = status_of(&socket_of(running)?)?.sessions;
            output.answer(&sessions, || table(&sessions))?;
        }
        SessionCommand::Kick { session, running } => {
            let ask = Ask::Kick { session: session.clone() };
            let Response::Kicked(ended) = asked(&socket_of(running)?, ask)? else {
                return Err(not_understood());
            };
            let line = |session: &String| format!("ended the session of {session}\n");
            output.answer(&ended, || ended.iter().map(line).collect())?;
        }
    }
    Ok(Exit::Ok)
}

fn table(sessions: &[SessionStatus]) -> String {
    let width = |text: fn(&SessionStatus) -> usize, head: usize| {
        sessions.iter().map(text).max().unwrap_or(0).max(head)
    };
    let (host, peer) = (width(|s| s.host.len(), 4), width(|s| s.peer.len(), 4));
    let head = ("NUMBER", "HOST", "FROM", "CONNECTIONS");
    let mut text =
        format!("{:>6}  {:<host$}  {:<peer$}  {:>11}  VOLUMES\n", head.0, head.1, head.2, head.3);
    for s in sessions {
        let volumes = if s.fenced { "(fenced)".to_owned() } else { s.volumes.join(",") };
        text += &format!(
            "{:>6}  {:<host$}  {:<peer$}  {:>11}  {volumes}\n",
            s.number, s.host, s.peer, s.connections
        );
    }
    text
}
