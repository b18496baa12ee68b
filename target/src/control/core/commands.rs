//! The commands on admin connections: which part of core answers each.

use std::time::Instant;

use rblk_protocol::{CommandCapsule, Opcode, Status};

use super::Core;
use super::admin_command::{AdminAnswer, AdminCommand, refuse};
use super::effect::ConnectionRef;
use super::gate::Member;
use super::list::list;
use super::seals::Unsealed;
use crate::control::peers::session::Leave;
use crate::volume::ids::AdmissionId;

impl Core {
    /// An admin command came by a connection, with its in-capsule data.
    pub fn command(
        &mut self,
        from: ConnectionRef,
        id: AdmissionId,
        capsule: &CommandCapsule,
        body: &[u8],
        now: Instant,
    ) {
        self.latest = now;
        let command = AdminCommand { from, id, capsule, body, now };
        let answer = match self.gate.member(id) {
            Some(member) => self.member_says(member, &command),
            None => self.stranger_says(&command),
        };
        match answer {
            AdminAnswer::Now(status, value, payload) => {
                self.out.reply(from, capsule.tag, (status, value), payload);
            }
            AdminAnswer::Later => {}
        }
        self.holdings.finish_opens(&mut self.sessions, &mut self.out, now);
    }

    fn stranger_says(&mut self, command: &AdminCommand<'_>) -> AdminAnswer {
        let Self { gate, sessions, drain, out, .. } = self;
        if !gate.is_stranger(command.id) {
            // The connection ended meanwhile: there is no peer to answer.
            return AdminAnswer::Later;
        }
        match command.capsule.opcode {
            Opcode::Authenticate => gate.authenticate(command, out),
            Opcode::Login => gate.login(command, drain.has_begun(), sessions, out),
            _ => refuse(Status::NotReady),
        }
    }

    fn member_says(&mut self, member: Member, command: &AdminCommand<'_>) -> AdminAnswer {
        match self.out.seals().open(command.from, command.capsule, command.body) {
            Unsealed::Plain => self.answer(member, command),
            Unsealed::Sealed(opened) => {
                self.answer(member, &AdminCommand { body: &opened, ..*command })
            }
            Unsealed::Broken(error) => {
                self.gate.distrust(command, &error.to_string(), &mut self.out);
                AdminAnswer::Later
            }
            Unsealed::Ignored => AdminAnswer::Later,
        }
    }

    fn answer(&mut self, member: Member, command: &AdminCommand<'_>) -> AdminAnswer {
        let Self { sessions, holdings, drain, out, .. } = self;
        let (capsule, Member { session, epoch, .. }) = (command.capsule, member);
        let Some(state) = sessions.table().get(session) else {
            return refuse(Status::NoSuchSession);
        };
        match state.leave() {
            Some(Leave::Fenced) => return refuse(Status::Fenced),
            Some(Leave::LoggedOut) => return refuse(Status::NotReady),
            Some(Leave::Revoked) => return refuse(Status::NotAllowed),
            None => {}
        }
        if state.way(epoch).is_none() || capsule.epoch != epoch {
            return refuse(Status::Fenced);
        }
        if !state.is_in(epoch) && capsule.opcode != Opcode::Login {
            return refuse(Status::NotReady);
        }
        match capsule.opcode {
            Opcode::Login => sessions.login_again(command, (session, epoch), out),
            Opcode::ListVolumes => {
                let overhead = out.overhead(command.from);
                list(capsule, overhead, session, (sessions, holdings.exports()))
            }
            Opcode::OpenVolume => holdings.open(command, session, sessions, out),
            Opcode::CloseVolume => holdings.close(command, session, sessions, out),
            Opcode::AsyncEvent => {
                sessions.park(command, session, || drain.news_for(session, epoch))
            }
            Opcode::Drop => sessions.drop_epochs(command, (session, epoch), out),
            Opcode::Logout => holdings.logout(session, sessions, out),
            _ => refuse(Status::InvalidOpcode),
        }
    }
}
