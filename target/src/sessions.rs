//! `rblk-target session`: the sessions of the target that runs.

use rblk_config::Exit;
use rblk_target::args::{Output, SessionCommand};
use rblk_target::control::socket::{Ask, Response};
use rblk_target::control::status::SessionStatus;

use crate::running::socket_of;
use crate::{asked, not_understood};

/// Does what was asked.
pub(crate) fn session(command: &SessionCommand) -> anyhow::Result<Exit> {
    match command {
        SessionCommand::List(running) => match asked(&socket_of(running)?, Ask::Status)? {
            Ok(Response::Status(status)) if running.output == Output::Json => {
                println!("{}", serde_json::to_string_pretty(&status.sessions)?);
                Ok(Exit::Ok)
            }
            Ok(Response::Status(status)) => {
                print!("{}", table(&status.sessions));
                Ok(Exit::Ok)
            }
            Ok(_) => Err(not_understood()),
            Err(exit) => Ok(exit),
        },
        SessionCommand::Kick { session, running } => {
            let question = Ask::Kick { session: session.clone() };
            match asked(&socket_of(running)?, question)? {
                Ok(Response::Kicked(ended)) if running.output == Output::Json => {
                    println!("{}", serde_json::to_string_pretty(&ended)?);
                    Ok(Exit::Ok)
                }
                Ok(Response::Kicked(ended)) => {
                    ended.iter().for_each(|session| println!("ended the session of {session}"));
                    Ok(Exit::Ok)
                }
                Ok(_) => Err(not_understood()),
                Err(exit) => Ok(exit),
            }
        }
    }
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
