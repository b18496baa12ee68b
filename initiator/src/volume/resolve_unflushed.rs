//! [`resolve_unflushed`]: decides the fate of acknowledged writes that no FLUSH covered, when the
//! volume's write verifier changed. They are written again from the copies that the queues retain,
//! or they count as lost, and FLUSHes fail by the mount's `on_loss`. If the target refuses some
//! copies, the others are written and flushed all the same.
//!
//! [`resolve_unflushed`] runs within a try to reconnect. The queues have no path, and get one only
//! after it has succeeded. Its writes stay valid even if the try fails later. Until then the queues
//! keep their copies, so the next try can write everything again. No other host may write to the
//! volume, so a second write changes nothing.

use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::Context;
use rblk_protocol::width::wide64;
use rblk_protocol::{
    AsyncEvent, BlockCount, BlockSize, Features, OpenReply, QueueDepth, Status, VolumeEntry,
    VolumeFlags,
};
use rblk_runtime::mailbox::Sender;
use tokio::sync::oneshot;

use super::replay::{self, ReplayOutcome, Replayer};
use super::session::{QueueWish, REPLAY_QUEUE, Session};
use crate::engine::durability::Durability;
use crate::engine::durability::retain::{RangeContent, ReplayLog, Retained};
use crate::engine::pulse::Pulse;
use crate::queue::ToQueue;

/// Time for the answer of a queue thread.
const STOCK_DEADLINE: Duration = Duration::from_secs(10);

/// The parts of the mount that [`resolve_unflushed`] uses.
#[derive(Clone, Debug)]
pub struct UnflushedParts {
    /// Which acknowledged writes are durable.
    pub durability: Arc<Durability>,
    /// Mail to every queue thread.
    pub queues: Vec<Sender<ToQueue>>,
    /// The wish of each queue.
    pub wish: QueueWish,
    /// The pulse that keeps the session alive meanwhile.
    pub pulse: Pulse,
}

/// The fate of acknowledged writes that no FLUSH covered.
#[derive(Debug)]
pub enum Judgement {
    /// There are no such writes.
    Nothing,
    /// The writes may be lost, and FLUSHes must report it: some queues have no copies.
    Lost {
        /// Writes numbered below this.
        horizon: u64,
        /// The largest possible number of these writes.
        writes: u64,
        /// A queue that retained copies was dropped with them. One of those may be newer than a
        /// copy in another queue, which must not overwrite it: nothing is written again.
        dropped: bool,
    },
    /// The writes have copies, and are written again.
    Rewrite {
        /// Writes numbered below this.
        horizon: u64,
        /// The copies to write and flush before the queues go on.
        log: ReplayLog,
        /// Blocks that were written and now lie behind the end of the volume.
        behind_end: u64,
        /// A process before this one may have left writes without copies: FLUSHes must report a
        /// loss all the same.
        doubt: bool,
    },
}

/// Judges the copies of all queues together: `None` when one of them keeps no copies. No queue has
/// a path: no write is acknowledged until the queues get theirs. If the volume shrank, only its
/// first `blocks` blocks are written again: the others are gone, as they would be without a crash.
#[must_use]
pub fn judge(
    durability: &Durability,
    stock: Option<Vec<Retained>>,
    (block_size, blocks): (BlockSize, BlockCount),
) -> Judgement {
    let (durable, horizon) = (durability.durable(), durability.horizon());
    let writes = horizon.saturating_sub(durable);
    match stock {
        _ if writes == 0 => Judgement::Nothing,
        None => Judgement::Lost { horizon, writes, dropped: false },
        Some(mut entries) => {
            // Drop copies that became durable since their queue gave them.
            entries.retain(|entry| entry.number >= durable);
            let doubt = durability.inherits_doubt();
            // Every number has a copy, save the one that stands for a process before this one.
            if wide64(entries.len()) + u64::from(doubt) < writes {
                return Judgement::Lost { horizon, writes, dropped: true };
            }
            let mut log = ReplayLog::merge(entries, block_size);
            let behind_end = log.cut(blocks);
            Judgement::Rewrite { horizon, log, behind_end, doubt }
        }
    }
}

impl Judgement {
    /// Enters the judgement in the account, with the outcome of writing the log again;
    /// [`ReplayOutcome::Durable`] where there was nothing to write. A path that died on the way
    /// settles nothing: judge again.
    pub fn enter(&self, durability: &Durability, outcome: ReplayOutcome) {
        let Self::Rewrite { horizon, log, doubt, .. } = self else {
            if let Self::Lost { horizon, .. } = self {
                durability.lose(*horizon);
            }
            return;
        };
        match outcome {
            ReplayOutcome::Durable => {
                if *doubt {
                    durability.lose(*horizon);
                }
                durability.rewritten(*horizon, log.writes());
            }
            // Users read these writes, so a second write does not change data under them. As after
            // every failed FLUSH, some may be lost.
            ReplayOutcome::Unflushed(_) => {
                durability.lose_but_keep_copies(*horizon);
                durability.wrote_copies();
            }
            ReplayOutcome::Refused { .. } => durability.hold_copies(*horizon),
        }
    }
}

/// Settles the account after the volume came back with another verifier, or its target had refused
/// copies.
///
/// # Errors
/// The session or its path died on the way, a queue thread does not answer, or the volume changed
/// meanwhile: nothing is settled.
pub async fn resolve_unflushed(
    session: &mut Session,
    volume: &OpenReply,
    account: &UnflushedParts,
) -> anyhow::Result<()> {
    let stock = take_stock(&account.queues).await?;
    let shape = (volume.block_size, volume.blocks);
    let judgement = judge(&account.durability, stock, shape);
    let (begun, held) = (Instant::now(), account.durability.holds_copies());
    let mut outcome = ReplayOutcome::Durable;
    if let Judgement::Rewrite { log, .. } = &judgement
        && !log.pieces().is_empty()
    {
        outcome = rewrite(session, volume, account, log).await?;
    }
    let why = match held {
        true => "the target refused it before",
        false => "the target lost its memory",
    };
    tell((&judgement, why), outcome, begun.elapsed(), account.durability.on_loss().consequence());
    judgement.enter(&account.durability, outcome);
    Ok(())
}

/// Logs the outcome.
fn tell(
    (judgement, why): (&Judgement, &str),
    outcome: ReplayOutcome,
    took: Duration,
    consequence: &str,
) {
    let (log, behind_end, doubt) = match judgement {
        Judgement::Nothing => {
            return tracing::info!(
                "the target lost its memory; every acknowledged write was flushed before"
            );
        }
        Judgement::Lost { writes, dropped: true, .. } => {
            return tracing::error!(
                rblk_event = "lost-writes",
                writes,
                "lost: a queue was dropped that had copies, so older copies of other queues are not written again, and \
                 acknowledged writes may be lost; {consequence}"
            );
        }
        Judgement::Lost { writes, .. } => {
            return tracing::error!(
                rblk_event = "lost-writes",
                writes,
                "lost: the target lost its memory, so acknowledged writes that were not flushed may be lost; \
                 {consequence}. --retain would have kept them"
            );
        }
        Judgement::Rewrite { log, behind_end, doubt, .. } => (log, *behind_end, *doubt),
    };
    if behind_end > 0 {
        tracing::warn!(
            blocks = behind_end,
            "the volume became smaller; the data behind its new end is gone, and is not written again"
        );
    }
    if doubt {
        tracing::error!(
            rblk_event = "lost-writes",
            "lost: the target lost its memory, so acknowledged writes of a process before this one may be lost; \
             {consequence}"
        );
    }
    match outcome {
        ReplayOutcome::Durable => tracing::warn!(
            rblk_event = "rewrite",
            writes = log.writes(),
            pieces = log.pieces().len(),
            ?took,
            "{why}; the unflushed writes were written again"
        ),
        ReplayOutcome::Unflushed(errno) => tracing::error!(
            rblk_event = "lost-writes",
            writes = log.writes(),
            errno,
            "lost: the unflushed writes were written again, but the target failed the FLUSH after it, so acknowledged \
             writes may be lost; {consequence}. Their copies are kept"
        ),
        ReplayOutcome::Refused { blocks, errno, flushed } => tracing::error!(
            rblk_event = "lost-writes",
            writes = log.writes(),
            blocks,
            errno,
            others_are_durable = flushed,
            "lost: the target refuses to write {blocks} blocks again, so acknowledged writes may be lost; \
             {consequence}"
        ),
    }
}

/// Writes the log again. A volume that refuses all writes is not tried.
async fn rewrite(
    session: &mut Session,
    volume: &OpenReply,
    account: &UnflushedParts,
    log: &ReplayLog,
) -> anyhow::Result<ReplayOutcome> {
    if volume.flags.has(VolumeFlags::READ_ONLY) {
        // A discard is a hint.
        let pieces = log.pieces().iter().filter(|piece| piece.what != RangeContent::Discarded);
        return Ok(match pieces.map(|piece| piece.count.0).sum() {
            0 => ReplayOutcome::Durable,
            blocks => {
                ReplayOutcome::Refused { blocks, errno: Status::ReadOnly.errno(), flushed: false }
            }
        });
    }
    let outcome = replay(session, volume, account, log).await;
    let outcome = outcome.context("writing the unflushed writes again")?;
    if outcome.may_be_of_change() {
        // Writes refused because the volume has just changed are judged by the next OPEN.
        let volumes = session.list().await.context("asking why writes were refused")?;
        let now = volumes.iter().find(|now| now.uuid == volume.uuid);
        let is_as_it_was = |now: &VolumeEntry| {
            let read_only = now.flags.has(VolumeFlags::READ_ONLY);
            now.blocks == volume.blocks && !read_only
        };
        anyhow::ensure!(now.is_some_and(is_as_it_was), "the volume changed meanwhile");
    }
    Ok(outcome)
}

/// Ends the rest of the queues' paths, and returns the queues' copies; `None` when one of them
/// keeps no copies. A dropped queue counts as empty.
async fn take_stock(queues: &[Sender<ToQueue>]) -> anyhow::Result<Option<Vec<Retained>>> {
    let (mut answers, mut all) = (Vec::new(), Some(Vec::new()));
    for queue in queues {
        if queue.is_closed() {
            // The program has dropped this queue, with its copies. `judge` notices the missing
            // numbers.
            continue;
        }
        let (reply, answer) = oneshot::channel();
        if !ToQueue::TakeStock(reply).post(queue).is_taken {
            anyhow::bail!("a queue thread takes no mail");
        }
        answers.push(answer);
    }
    for answer in answers {
        let stock = tokio::time::timeout(STOCK_DEADLINE, answer)
            .await
            .context("a queue thread does not answer")?
            .context("a queue thread ended")?;
        match (&mut all, stock) {
            (Some(all), Some(stock)) => all.extend(stock),
            _ => all = None,
        }
    }
    Ok(all)
}

/// Has the target make its acknowledged writes durable, and enters that in the account. Held copies
/// stay: the target does not have them.
///
/// # Errors
/// The session or the path for it died, or the target refuses.
pub async fn flush(
    session: &mut Session,
    volume: &OpenReply,
    account: &UnflushedParts,
) -> anyhow::Result<()> {
    let horizon = account.durability.horizon();
    let nothing = ReplayLog::merge(Vec::new(), volume.block_size);
    match replay(session, volume, account, &nothing).await? {
        ReplayOutcome::Durable => {
            account.durability.made_durable(horizon);
            Ok(())
        }
        ReplayOutcome::Unflushed(errno) | ReplayOutcome::Refused { errno, .. } => {
            anyhow::bail!("the target fails the FLUSH: errno {errno}")
        }
    }
}

async fn replay(
    session: &mut Session,
    volume: &OpenReply,
    account: &UnflushedParts,
    log: &ReplayLog,
) -> anyhow::Result<ReplayOutcome> {
    let depth = QueueDepth::new(replay::DEPTH.min(account.wish.depth.get())).context("depth")?;
    let wish = QueueWish { depth, features: Features::default(), lanes: Some(1), ..account.wish };
    let buffers = replay::buffers(wish)?;
    let memory = Arc::clone(&buffers).into();
    let path = session.connect_queue(REPLAY_QUEUE, wish, volume.handle, &memory).await?;
    let replay =
        Replayer::new(log, path, buffers, wish, Instant::now()).with_pulse(account.pulse).run();
    tokio::pin!(replay);
    // Keep the session alive meanwhile.
    loop {
        tokio::select! {
            result = &mut replay => return Ok(result?),
            event = session.admin.event(account.pulse) => match event? {
                Some(AsyncEvent::Draining | AsyncEvent::Upgrading) => {
                    anyhow::bail!("the target goes away");
                }
                event => tracing::debug!(?event, "event of the target"),
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use rblk_config::OnLoss;
    use rblk_protocol::{BlockCount, Lba};

    use super::*;

    fn block_size() -> BlockSize {
        BlockSize::new(512).unwrap()
    }

    /// The shape of a volume of 4 blocks.
    fn shape() -> (BlockSize, BlockCount) {
        (block_size(), BlockCount(4))
    }

    const REFUSED: ReplayOutcome = ReplayOutcome::Refused { blocks: 1, errno: 5, flushed: true };

    fn retained(number: u64) -> Retained {
        Retained {
            number,
            what: RangeContent::Data,
            lba: Lba(number),
            count: BlockCount(1),
            data: vec![7; 512],
        }
    }

    /// An account with `unflushed` acknowledged writes since the last FLUSH.
    fn account(durability: Arc<Durability>, unflushed: u64) -> Arc<Durability> {
        use crate::engine::durability::Ledger;
        use crate::engine::io::{Io, IoOp};
        let depth = QueueDepth::new(1).unwrap();
        let mut ledger = Ledger::new(Arc::clone(&durability), depth, None);
        let io = Io::new(IoOp::Write, 0, 512, block_size()).unwrap();
        for _ in 0..unflushed {
            ledger.submitted(rblk_protocol::Tag(0));
            ledger.plan(rblk_protocol::Tag(0), &io);
            ledger.answered(rblk_protocol::Tag(0), &io, Status::Ok, |_, _| {});
        }
        durability
    }

    #[test]
    fn flushed_writes_need_no_settling() {
        let account = account(Durability::new(OnLoss::Once), 0);
        for stock in [None, Some(Vec::new())] {
            let judgement = judge(&account, stock, shape());
            assert!(matches!(judgement, Judgement::Nothing), "{judgement:?}");
            judgement.enter(&account, ReplayOutcome::Durable);
            assert_eq!(account.losses(), 0);
        }
    }

    #[test]
    fn a_loss_is_reported_without_copies_and_copies_are_written_again() {
        let lost = account(Durability::new(OnLoss::Once), 2);
        let judgement = judge(&lost, None, shape());
        let expected = Judgement::Lost { horizon: 2, writes: 2, dropped: false };
        assert_eq!(format!("{judgement:?}"), format!("{expected:?}"));
        judgement.enter(&lost, ReplayOutcome::Durable);
        assert_eq!((lost.losses(), lost.unflushed()), (1, 0));

        for (outcome, losses, writes) in [(ReplayOutcome::Durable, 0, 2), (REFUSED, 1, 0)] {
            let kept = account(Durability::new(OnLoss::Once), 2);
            let judgement = judge(&kept, Some(vec![retained(0), retained(1)]), shape());
            match &judgement {
                Judgement::Rewrite { horizon: 2, log, doubt: false, behind_end: 0 } => {
                    assert_eq!(log.writes(), 2);
                }
                other => panic!("{other:?}"),
            }
            judgement.enter(&kept, outcome);
            let found = (kept.losses(), kept.writes_rewritten(), kept.unflushed());
            assert_eq!(found, (losses, writes, 0));
        }
    }

    #[test]
    fn writes_of_an_earlier_process_are_reported_even_with_copies() {
        for (own, stock) in [(0, vec![]), (1, vec![retained(1)])] {
            let account = account(Durability::inheriting(OnLoss::Once), own);
            let judgement = judge(&account, Some(stock), shape());
            assert!(matches!(judgement, Judgement::Rewrite { doubt: true, .. }), "{judgement:?}");
            judgement.enter(&account, ReplayOutcome::Durable);
            assert_eq!((account.losses(), account.unflushed()), (1, 0));
            assert_eq!(account.writes_rewritten(), own);
            // The loss is reported once.
            let again = judge(&account, Some(Vec::new()), shape());
            assert!(matches!(again, Judgement::Nothing), "{again:?}");
        }
    }

    /// A dropped queue may have had newer data, which older copies must not replace.
    #[test]
    fn no_copy_is_written_again_when_a_queue_was_dropped_with_some() {
        for (on_loss, inherits) in [(OnLoss::UntilRemount, false), (OnLoss::Once, true)] {
            let kept = match inherits {
                true => Durability::inheriting(on_loss),
                false => Durability::new(on_loss),
            };
            let first = kept.horizon();
            let kept = account(kept, 2);
            // The newer copy is missing.
            let judgement = judge(&kept, Some(vec![retained(first)]), shape());
            assert!(matches!(judgement, Judgement::Lost { dropped: true, .. }), "{judgement:?}");
            judgement.enter(&kept, ReplayOutcome::Durable);
            let found = (kept.losses(), kept.writes_rewritten(), kept.unflushed());
            assert_eq!(found, (1, 0, 0));
        }
        // Also with held copies: newer writes cannot be distinguished from dropped ones.
        let held = account(Durability::new(OnLoss::UntilRemount), 1);
        judge(&held, Some(vec![retained(0)]), shape()).enter(&held, REFUSED);
        let held = account(held, 1);
        held.made_durable(2);
        let judgement = judge(&held, Some(vec![retained(0)]), shape());
        assert!(matches!(judgement, Judgement::Lost { dropped: true, .. }), "{judgement:?}");
        judgement.enter(&held, ReplayOutcome::Durable);
        assert_eq!((held.unflushed(), held.holds_copies()), (0, false));
    }

    #[test]
    fn a_write_that_became_durable_hides_no_missing_copy() {
        let kept = account(Durability::new(OnLoss::UntilRemount), 2);
        kept.made_durable(1);
        let judgement = judge(&kept, Some(vec![retained(0)]), shape());
        assert!(matches!(judgement, Judgement::Lost { dropped: true, .. }), "{judgement:?}");
        let judgement = judge(&kept, Some(vec![retained(0), retained(1)]), shape());
        let Judgement::Rewrite { log, .. } = &judgement else { panic!("{judgement:?}") };
        assert_eq!(log.writes(), 1);
    }

    #[test]
    fn blocks_behind_the_end_are_neither_written_nor_lost() {
        let kept = account(Durability::new(OnLoss::UntilRemount), 2);
        let stock = Some(vec![retained(0), Retained { lba: Lba(4), ..retained(1) }]);
        let judgement = judge(&kept, stock, shape());
        let Judgement::Rewrite { log, behind_end: 1, doubt: false, .. } = &judgement else {
            panic!("{judgement:?}")
        };
        assert_eq!(log.pieces().iter().map(|p| p.lba.0).collect::<Vec<_>>(), [0]);
        judgement.enter(&kept, ReplayOutcome::Durable);
        assert_eq!((kept.losses(), kept.unflushed()), (0, 0));
    }

    #[test]
    fn copies_that_the_target_has_at_last_are_freed_by_the_next_flush() {
        let kept = account(Durability::new(OnLoss::UntilRemount), 2);
        let stock = || Some(vec![retained(0), retained(1)]);
        judge(&kept, stock(), shape()).enter(&kept, REFUSED);
        kept.made_durable(2);
        assert_eq!((kept.holds_copies(), kept.unflushed()), (true, 2));
        judge(&kept, stock(), shape()).enter(&kept, ReplayOutcome::Unflushed(28));
        assert_eq!((kept.holds_copies(), kept.unflushed()), (false, 2));
        kept.made_durable(2);
        assert_eq!((kept.losses(), kept.unflushed()), (1, 0));
    }

    #[test]
    fn copies_stay_as_long_as_another_try_may_help() {
        let (until, once) = (OnLoss::UntilRemount, OnLoss::Once);
        let unflushed = ReplayOutcome::Unflushed(28);
        for (on_loss, outcome, unflushed, holds) in [
            (until, REFUSED, 2, true),
            (until, unflushed, 2, false),
            // FLUSH reports the loss, and the user keeps reading the copies: they must not change.
            (once, REFUSED, 0, false),
            // The user reads its own writes.
            (once, unflushed, 2, false),
        ] {
            let kept = account(Durability::new(on_loss), 2);
            let stock = || Some(vec![retained(0), retained(1)]);
            for turn in 0..2 {
                judge(&kept, stock(), shape()).enter(&kept, outcome);
                let found = (kept.losses(), kept.unflushed(), kept.holds_copies());
                assert_eq!(found, (1, unflushed, holds), "{on_loss} {outcome:?} {turn}");
            }
            judge(&kept, stock(), shape()).enter(&kept, ReplayOutcome::Durable);
            let found = (kept.losses(), kept.unflushed(), kept.holds_copies());
            assert_eq!(found, (1, 0, false), "{on_loss} {outcome:?}: a loss stays");
        }
    }
}
