//! [`Settles`]: by order of control, make durable the data that hosts wrote to a volume so far,
//! while the volume is served ([`ToGroup::Settle`](super::ToGroup::Settle)). Several run at a time.

use rblk_protocol::width::narrow;

use super::{FromGroup, PollGroup, SettleTicket};
use crate::cache::{PartToken, ShardReply, ShardRequest};
use crate::store::Store;
use crate::volume::ids::VolumeIndex;

/// Distinguishes the numbers of settles from those of [`Steps`](super::steps::Steps), for a shard.
pub(super) const OF_SETTLES: u16 = 0x8000;

/// One settle.
#[derive(Debug)]
struct Settle {
    ticket: SettleTicket,
    volume: VolumeIndex,
    // The dirty blocks are in the store, and its sync is running.
    is_written: bool,
}

/// See the module.
#[derive(Debug, Default)]
pub(super) struct Settles {
    under_way: Vec<Settle>,
}

impl<S: Store> PollGroup<S> {
    /// Makes durable the data that hosts wrote to a volume so far.
    pub(super) fn settle(&mut self, ticket: SettleTicket, volume: VolumeIndex) {
        self.settles.under_way.push(Settle { ticket, volume, is_written: false });
        let from = self.settle_token(ticket);
        self.state.shard.request(ShardRequest::Flush { from, volume });
    }

    fn settle_token(&self, ticket: SettleTicket) -> PartToken {
        PartToken::of_control(narrow(self.state.index), number_of(ticket))
    }

    /// The shard answered a request of a settle.
    #[cold]
    pub(super) fn on_settle_reply(&mut self, number: u16, reply: &ShardReply) {
        let ShardReply::Done { result, .. } = reply else {
            return debug_assert!(false, "a settle asks for nothing else");
        };
        let under_way = &mut self.settles.under_way;
        let Some(at) = under_way.iter().position(|settle| number_of(settle.ticket) == number)
        else {
            return debug_assert!(false, "an answer to a settle that is not under way");
        };
        let &Settle { ticket, volume, is_written } = &under_way[at];
        let result = match result {
            Ok(()) if !is_written && self.state.shard.is_writable(volume) => {
                self.settles.under_way[at].is_written = true;
                let from = self.settle_token(ticket);
                return self.state.shard.request(ShardRequest::Sync { from, volume });
            }
            Ok(()) => Ok(()),
            Err(errno) => Err(errno.to_string()),
        };
        self.settles.under_way.swap_remove(at);
        let group = self.state.index;
        self.state.told.outbox.push(FromGroup::Settled { group, ticket, result });
    }
}

fn number_of(ticket: SettleTicket) -> u16 {
    OF_SETTLES | narrow::<u16, _>(ticket.0 & u64::from(!OF_SETTLES))
}
