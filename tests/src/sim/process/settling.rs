//! [`Settling`]: the treatment of acknowledged writes that are not durable after the target
//! restarted.
//!
//! The mount writes its copies again over a queue of their own before it connects any other queue.
//! A write without a copy is lost, and a FLUSH reports it. The product and the oracle settle at the
//! same moment.

use std::sync::Arc;

use rblk_config::{DigestWish, OnLoss};
use rblk_initiator::engine::durability::retain::Piece;
use rblk_initiator::volume::course::Failure;
use rblk_initiator::volume::replay::{self, Progress, ReplayOutcome, Replayer};
use rblk_initiator::volume::resolve_unflushed::{self, Judgement};
use rblk_initiator::volume::session::{QueueWish, REPLAY_QUEUE};
use rblk_protocol::{Features, OpenReply, QueueDepth};
use rblk_rig::inprocess::QueueOptions;

use super::phase::{Going, Phase, Settling, Trying};
use super::{Ground, Process};
use crate::sim::plan::Moment;

impl Process {
    pub(super) fn settle(
        &mut self,
        trying: &mut Trying,
        volume: &OpenReply,
        ground: &mut Ground<'_>,
    ) -> Going {
        let mut stock = Some(Vec::new());
        for queue in &self.queues {
            let entries = ground.site.rig.engine_mut(*queue).take_stock();
            match (&mut stock, entries) {
                (Some(all), Some(entries)) => all.extend(entries),
                _ => stock = None,
            }
        }
        let shape = (volume.block_size, volume.blocks);
        let judgement = resolve_unflushed::judge(&self.durability, stock, shape);
        let log = match &judgement {
            Judgement::Rewrite { log, .. } => {
                let numbers = [self.mount.0.into(), log.writes(), log.pieces().len() as u64];
                ground.log.add("rewrites", numbers);
                Arc::new(log.clone())
            }
            Judgement::Nothing | Judgement::Lost { .. } => {
                self.settled(&judgement, ReplayOutcome::Durable, ground);
                return self.begin_queues(trying, ground);
            }
        };
        ground.moments.push(Moment::Settle);
        if log.pieces().is_empty() {
            self.settled(&judgement, ReplayOutcome::Durable, ground);
            return self.begin_queues(trying, ground);
        }
        let depth = QueueDepth::new(replay::DEPTH.min(self.plan.depth)).expect("a depth");
        let options = QueueOptions {
            depth: depth.get(),
            features: self.plan.features.and(Features::DIGEST),
            lanes: 1,
            ..self.queue_options()
        };
        let wish = QueueWish {
            depth,
            io_max_bytes: options.io_max_bytes,
            in_capsule_bytes: options.in_capsule_bytes,
            features: options.features,
            digest: if options.features.has(Features::DIGEST) {
                DigestWish::Crc32c
            } else {
                DigestWish::Off
            },
            lanes: Some(1),
            queues: 1,
        };
        let buffers = replay::buffers(wish).expect("memory");
        let Some(to) = trying.destination() else { return Going::Failed(Failure::Transient) };
        let (path, wires) = match self.path(&to, REPLAY_QUEUE, options, &buffers, ground) {
            Ok(Some(made)) => made,
            Ok(None) => {
                trying.phase = Phase::Unanswered;
                return Going::On;
            }
            Err(why) => return Going::Failed(why),
        };
        let now = ground.site.rig.now();
        let pulse = self.pulse();
        let replayer = Replayer::new(log, path, buffers, wish, now).with_pulse(pulse);
        trying.phase =
            Phase::Settle(Box::new(Settling { replayer, judgement, wires, begun: false }));
        Going::On
    }

    /// Settles both accounts: the product's, and the oracle's.
    fn settled(&mut self, judgement: &Judgement, outcome: ReplayOutcome, ground: &mut Ground<'_>) {
        judgement.enter(&self.durability, outcome);
        let owes = self.owes();
        let settled = match judgement {
            Judgement::Rewrite { log, .. } if outcome == ReplayOutcome::Durable => {
                let again = |block: usize| {
                    let block = block as u64;
                    let has = |p: &Piece| (p.lba.0..p.lba.0 + p.count.0).contains(&block);
                    log.pieces().iter().any(has)
                };
                ground.log.add("rewritten", [self.mount.0.into(), log.writes(), 0]);
                ground.oracle.go_on(self.mount, Some(&again), owes)
            }
            _ => {
                let losses = self.durability.losses();
                ground.log.add("settled", [self.mount.0.into(), losses, 0]);
                ground.oracle.go_on(self.mount, None, true)
            }
        };
        assert_eq!(settled, Ok(()), "mount {}", self.mount.0);
    }

    /// Whether the mount has a new loss to report, which excuses missing writes. A loss that every
    /// flush reports lasts, and excuses only the writes lost with it.
    fn owes(&mut self) -> bool {
        let losses = self.durability.losses();
        let before = std::mem::replace(&mut self.settled_losses, losses);
        match self.durability.on_loss() {
            OnLoss::Once => self.durability.has_untold_loss(),
            OnLoss::UntilRemount => losses > before,
        }
    }

    pub(super) fn rewrite(&mut self, trying: &mut Trying, ground: &mut Ground<'_>) -> Going {
        let now = ground.site.rig.now();
        let Phase::Settle(settling) = &mut trying.phase else { return Going::On };
        let outcome = match settling.replayer.turn(now) {
            Ok(Progress::Done(outcome)) => outcome,
            Ok(Progress::Busy) => {
                if !std::mem::replace(&mut settling.begun, true) {
                    ground.moments.push(Moment::Rewrite);
                }
                return Going::On;
            }
            Ok(Progress::Idle) => return Going::On,
            Err(_) => return Going::Failed(Failure::Transient),
        };
        let Phase::Settle(settling) = std::mem::replace(&mut trying.phase, Phase::Unanswered)
        else {
            return Going::On;
        };
        self.settled(&settling.judgement, outcome, ground);
        self.begin_queues(trying, ground)
    }
}
