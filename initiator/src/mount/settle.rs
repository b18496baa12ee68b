//! [`settle`]: decides what becomes of acknowledged writes that no FLUSH covered, when the volume's
//! write verifier changed. They are written again from what the queues retain, or they count as
//! lost, and FLUSHes fail as the mount's `on_loss` says.
//!
//! It runs within a try to reconnect. The queues have no path, and get one only when it has
//! succeeded. What it did stays valid even if the try fails later. Until then the queues keep what
//! they retain, so the next try can write everything again. No other host may write to the volume,
//! so a second time changes nothing.

use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::Context;
use rblk_fabric::mailbox::Sender;
use rblk_protocol::{AsyncEvent, BlockSize, Features, OpenReply, QueueDepth};
use tokio::sync::oneshot;

use crate::admin::Pulse;
use crate::durability::Durability;
use crate::queue::ToQueue;
use crate::replay::{self, ReplayError, Replayer};
use crate::retain::{ReplayLog, Retained};
use crate::session::{QueueWish, REPLAY_QUEUE, Session};

/// How long a queue thread may take to answer.
const STOCK_DEADLINE: Duration = Duration::from_secs(10);

/// What [`settle`] needs to know of the mount.
#[derive(Clone, Debug)]
pub struct Account {
    /// Which acknowledged writes are durable.
    pub durability: Arc<Durability>,
    /// Mail to every queue thread.
    pub queues: Vec<Sender<ToQueue>>,
    /// What a queue asks for.
    pub wish: QueueWish,
    /// How the session is kept alive meanwhile.
    pub pulse: Pulse,
}

/// What is to become of acknowledged writes that no FLUSH covered.
#[derive(Debug)]
pub enum Judgement {
    /// There are none.
    Nothing,
    /// They may be lost, and FLUSHes must tell: not all queues retain what they acknowledged.
    Lost {
        /// Those numbered below.
        horizon: u64,
        /// How many there may be.
        writes: u64,
    },
    /// They are to be written again.
    Rewrite {
        /// Those numbered below.
        horizon: u64,
        /// What is to be written, and durable, before the queues go on.
        log: ReplayLog,
        /// A process before this one may have left some that no queue retains: FLUSHes must tell a
        /// loss all the same.
        doubt: bool,
    },
}

/// Judges what the queues retain, of all of them together: `None` when one of them retains nothing.
/// No queue has a path: nothing more is acknowledged until they get theirs.
#[must_use]
pub fn judge(
    durability: &Durability,
    stock: Option<Vec<Retained>>,
    block_size: BlockSize,
) -> Judgement {
    let (horizon, writes) = (durability.horizon(), durability.unflushed());
    match stock {
        _ if writes == 0 => Judgement::Nothing,
        None => Judgement::Lost { horizon, writes },
        Some(entries) => Judgement::Rewrite {
            horizon,
            log: ReplayLog::merge(entries, block_size),
            doubt: durability.inherits_doubt(),
        },
    }
}

impl Judgement {
    /// Enters it in the account. `rewritten` says that the log is written again and durable; if the
    /// target refused that, its writes may be lost, too, and their copies are dropped: users
    /// read the older data from then on. A path that died on the way settles nothing: judge
    /// again.
    pub fn settle(&self, durability: &Durability, rewritten: bool) {
        match self {
            Self::Nothing => {}
            Self::Lost { horizon, .. } => durability.lose(*horizon),
            Self::Rewrite { horizon, .. } if !rewritten => durability.lose(*horizon),
            Self::Rewrite { horizon, log, doubt } => {
                if *doubt {
                    durability.lose(*horizon);
                }
                durability.rewritten(*horizon, log.writes());
            }
        }
    }
}

/// Settles the account with a volume that came back with another verifier.
///
/// # Errors
/// The session or its path died on the way, or a queue thread does not answer: nothing is settled.
pub async fn settle(
    session: &mut Session,
    volume: &OpenReply,
    account: &Account,
) -> anyhow::Result<()> {
    let stock = take_stock(&account.queues).await?;
    let judgement = judge(&account.durability, stock, volume.block_size);
    let begun = Instant::now();
    let mut rewritten = true;
    let consequence = account.durability.on_loss().consequence();
    match &judgement {
        Judgement::Nothing => {
            tracing::info!(
                "the target lost its memory; every acknowledged write was flushed before"
            );
        }
        Judgement::Lost { writes, .. } => tracing::error!(
            rblk_event = "lost-writes",
            writes,
            "lost: the target lost its memory, so acknowledged writes that were not flushed may be lost; \
             {consequence}. --retain would have kept them"
        ),
        Judgement::Rewrite { log, doubt, .. } => {
            if !log.pieces().is_empty() {
                rewritten = rewrite(session, volume, account, log).await?;
            }
            if *doubt {
                tracing::error!(
                    rblk_event = "lost-writes",
                    "lost: the target lost its memory, so writes that the process before this one acknowledged may \
                     be lost; {consequence}"
                );
            }
            if rewritten {
                tracing::warn!(
                    rblk_event = "rewrite",
                    writes = log.writes(),
                    pieces = log.pieces().len(),
                    took = ?begun.elapsed(),
                    "the target lost its memory; what was not flushed was written again"
                );
            }
        }
    }
    judgement.settle(&account.durability, rewritten);
    Ok(())
}

/// Writes it again. Returns whether the target took it.
async fn rewrite(
    session: &mut Session,
    volume: &OpenReply,
    account: &Account,
    log: &ReplayLog,
) -> anyhow::Result<bool> {
    let Err(error) = replay(session, volume, account, log).await else { return Ok(true) };
    match error.downcast_ref::<ReplayError>() {
        Some(ReplayError::Refused(_)) => {
            tracing::error!(
                rblk_event = "lost-writes",
                writes = log.writes(),
                %error,
                "lost: acknowledged writes that were not flushed may be lost; {}",
                account.durability.on_loss().consequence()
            );
            Ok(false)
        }
        _ => Err(error.context("writing again what was not flushed")),
    }
}

/// Ends what is left of the queues' paths, and returns what the queues retain; `None` when one of
/// them retains nothing.
async fn take_stock(queues: &[Sender<ToQueue>]) -> anyhow::Result<Option<Vec<Retained>>> {
    let (mut answers, mut all) = (Vec::new(), Some(Vec::new()));
    for queue in queues {
        if queue.is_closed() {
            // The program that drove it has dropped it, with what it retained.
            all = None;
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

/// Has the target make durable what it acknowledged so far.
///
/// # Errors
/// The session or the path for it died, or the target refuses.
pub(super) async fn flush(
    session: &mut Session,
    volume: &OpenReply,
    account: &Account,
) -> anyhow::Result<()> {
    let nothing = ReplayLog::merge(Vec::new(), volume.block_size);
    replay(session, volume, account, &nothing).await
}

async fn replay(
    session: &mut Session,
    volume: &OpenReply,
    account: &Account,
    log: &ReplayLog,
) -> anyhow::Result<()> {
    let depth = QueueDepth::new(replay::DEPTH.min(account.wish.depth.get())).context("depth")?;
    let wish = QueueWish { depth, features: Features::default(), lanes: Some(1), ..account.wish };
    let buffers = replay::buffers(wish)?;
    let memory = Arc::clone(&buffers).into();
    let path = session.connect_queue(REPLAY_QUEUE, wish, volume.handle, &memory).await?;
    let replay =
        Replayer::new(log, path, buffers, wish, Instant::now()).with_pulse(account.pulse).run();
    tokio::pin!(replay);
    // Meanwhile the session has to be kept alive.
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
    use crate::retain::What;

    fn block_size() -> BlockSize {
        BlockSize::new(512).unwrap()
    }

    fn retained(number: u64) -> Retained {
        Retained {
            number,
            what: What::Data,
            lba: Lba(number),
            count: BlockCount(1),
            data: vec![7; 512],
        }
    }

    /// An account where `unflushed` writes were acknowledged since the last FLUSH.
    fn account(durability: Arc<Durability>, unflushed: u64) -> Arc<Durability> {
        use crate::durability::Ledger;
        use crate::io::{Io, IoOp};
        let depth = QueueDepth::new(1).unwrap();
        let mut ledger = Ledger::new(Arc::clone(&durability), depth, None);
        let io = Io::new(IoOp::Write, 0, 512, block_size()).unwrap();
        for _ in 0..unflushed {
            ledger.submitted(rblk_protocol::Tag(0));
            ledger.plan(rblk_protocol::Tag(0), &io);
            ledger.answered(rblk_protocol::Tag(0), &io, rblk_protocol::Status::Ok, |_, _| {});
        }
        durability
    }

    #[test]
    fn what_is_flushed_needs_nothing() {
        let account = account(Durability::new(OnLoss::Once), 0);
        for stock in [None, Some(Vec::new())] {
            let judgement = judge(&account, stock, block_size());
            assert!(matches!(judgement, Judgement::Nothing), "{judgement:?}");
            judgement.settle(&account, true);
            assert_eq!(account.losses(), 0);
        }
    }

    #[test]
    fn what_is_not_retained_is_told_and_what_is_retained_is_written_again() {
        let lost = account(Durability::new(OnLoss::Once), 2);
        let judgement = judge(&lost, None, block_size());
        assert!(matches!(judgement, Judgement::Lost { horizon: 2, writes: 2 }), "{judgement:?}");
        judgement.settle(&lost, true);
        assert_eq!((lost.losses(), lost.unflushed()), (1, 0));

        for (rewritten, losses, writes) in [(true, 0, 2), (false, 1, 0)] {
            let kept = account(Durability::new(OnLoss::Once), 2);
            let judgement = judge(&kept, Some(vec![retained(0), retained(1)]), block_size());
            match &judgement {
                Judgement::Rewrite { horizon: 2, log, doubt: false } => {
                    assert_eq!(log.writes(), 2);
                }
                other => panic!("{other:?}"),
            }
            judgement.settle(&kept, rewritten);
            let found = (kept.losses(), kept.writes_rewritten(), kept.unflushed());
            assert_eq!(found, (losses, writes, 0));
        }
    }

    #[test]
    fn what_a_process_before_left_is_told_whatever_is_retained() {
        for (own, stock) in [(0, vec![]), (1, vec![retained(1)])] {
            let account = account(Durability::inheriting(OnLoss::Once), own);
            let judgement = judge(&account, Some(stock), block_size());
            assert!(matches!(judgement, Judgement::Rewrite { doubt: true, .. }), "{judgement:?}");
            judgement.settle(&account, true);
            assert_eq!((account.losses(), account.unflushed()), (1, 0));
            assert_eq!(account.writes_rewritten(), own);
            // Once.
            let again = judge(&account, Some(Vec::new()), block_size());
            assert!(matches!(again, Judgement::Nothing), "{again:?}");
        }
    }
}
