//! [`settle`]: what becomes of acknowledged writes that no FLUSH covered when the volume's write verifier changed:
//! they are written again from what the queues retain, or their loss is told by the next FLUSH.
//!
//! It runs within a try to connect again: the queues have no path, and get theirs only when it has ended well. What
//! it did holds even if the try fails later. Until then the queues keep what they retain, so the next try can do it
//! all again: on a volume that nobody else may write, that changes nothing.

use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::Context;
use rblk_fabric::mailbox::Sender;
use rblk_protocol::{AsyncEvent, Features, OpenReply, QueueDepth, limits};
use tokio::sync::oneshot;

use crate::admin::Pulse;
use crate::durability::Durability;
use crate::queue::ToQueue;
use crate::replay::{self, ReplayError, Replayer};
use crate::retain::{ReplayLog, Retained};
use crate::session::{QueueWish, Session};

/// How long a queue thread may take to answer.
const STOCK_DEADLINE: Duration = Duration::from_secs(10);
/// The queue that writes again: the last there can be, so that it is no queue of a mount with fewer.
const REPLAY_QUEUE: u16 = limits::QUEUES_MAX - 1;

/// The mount's side of it.
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

/// Settles the account with a volume that came back with another verifier.
///
/// # Errors
/// The session or its path died on the way, or a queue thread does not answer: nothing is settled.
pub async fn settle(
    session: &mut Session,
    volume: &OpenReply,
    account: &Account,
) -> anyhow::Result<()> {
    let durability = &account.durability;
    let stock = take_stock(&account.queues).await?;
    // No queue has a path: nothing is acknowledged until they get theirs.
    let (horizon, unflushed) = (durability.horizon(), durability.unflushed());
    if unflushed == 0 {
        tracing::info!("the target lost its memory; every acknowledged write was flushed before");
        return Ok(());
    }
    let Some(entries) = stock else {
        tracing::error!(
            writes = unflushed,
            "the target lost its memory: acknowledged writes that were not flushed may be lost; the next FLUSH fails. \
             --retain would have kept them"
        );
        durability.lose(horizon);
        return Ok(());
    };
    let log = ReplayLog::merge(entries, volume.block_size);
    let begun = Instant::now();
    if !log.pieces().is_empty() {
        match replay(session, volume, account, &log).await {
            Ok(()) => {}
            Err(error) => match error.downcast_ref::<ReplayError>() {
                Some(ReplayError::Refused(_)) => {
                    tracing::error!(
                        writes = log.writes(),
                        %error,
                        "acknowledged writes that were not flushed may be lost; the next FLUSH fails"
                    );
                    durability.lose(horizon);
                    return Ok(());
                }
                _ => return Err(error.context("writing again what was not flushed")),
            },
        }
    }
    durability.rewritten(horizon, log.writes());
    tracing::warn!(
        writes = log.writes(),
        pieces = log.pieces().len(),
        took = ?begun.elapsed(),
        "the target lost its memory; what was not flushed was written again"
    );
    Ok(())
}

/// Ends what is left of the queues' paths, and returns what they retain; `None` when one of them retains nothing.
async fn take_stock(queues: &[Sender<ToQueue>]) -> anyhow::Result<Option<Vec<Retained>>> {
    let mut answers = Vec::new();
    for queue in queues {
        let (reply, answer) = oneshot::channel();
        if queue.send(ToQueue::TakeStock(reply)).is_err() {
            anyhow::bail!("a queue thread takes no mail");
        }
        answers.push(answer);
    }
    let mut all = Some(Vec::new());
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

async fn replay(
    session: &mut Session,
    volume: &OpenReply,
    account: &Account,
    log: &ReplayLog,
) -> anyhow::Result<()> {
    let depth = QueueDepth::new(replay::DEPTH.min(account.wish.depth.get())).context("depth")?;
    let wish = QueueWish { depth, features: Features::default(), ..account.wish };
    let buffers = replay::buffers(wish)?;
    let path = session.connect_queue(REPLAY_QUEUE, wish, volume.handle, &buffers).await?;
    let replay = Replayer::new(log, path, buffers, wish, Instant::now()).run();
    tokio::pin!(replay);
    // Meanwhile the session has to be kept alive.
    loop {
        tokio::select! {
            result = &mut replay => return Ok(result?),
            event = session.admin.event(account.pulse) => match event? {
                Some(AsyncEvent::Draining) => anyhow::bail!("the target drains"),
                event => tracing::debug!(?event, "event of the target"),
            },
        }
    }
}
