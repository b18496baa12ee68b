//! [`Mutation`]: the deliberate faults that the simulation must find.
//!
//! Each breaks one rule that protects I/O from being lost, stale or stuck. The code that keeps a
//! rule asks [`Mutation::is_on`]. Without the feature `mutations` the answer is a constant `false`,
//! and the compiler removes the question. With the feature, the environment variable
//! `RBLK_MUTATION` names the fault to switch on. No program that serves data may have the feature.
//! `tests/tests/mutations.rs` tries each mutation.

/// A deliberate fault.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Mutation {
    /// LOGIN of a new epoch is answered while connections of an older epoch are left.
    EpochOrderLogin,
    /// A dead connection is reported gone while the store still works for it.
    EpochOrderBurial,
    /// Memory that an answer is sent from is given back at the first completion of any kind.
    BufferReuseTarget,
    /// A lost path keeps its QP and its keys while its tags are used again.
    BufferReuseInitiator,
    /// Memory that a dead connection lent is given back when its QP is in the error state, not when
    /// the QP is destroyed.
    DestroyTarget,
    /// A queue uses its buffers on the next path while the QPs of the last path are not destroyed.
    DestroyInitiator,
    /// A FLUSH covers the writes acknowledged before its answer, not before its sending.
    FlushScopeAnswer,
    /// A FLUSH asks one shard of the cache only.
    FlushScopeShard,
    /// Of retained writes to one block the oldest is written again.
    ReplayOldest,
    /// No FLUSH tells of a loss.
    ReplaySilentLoss,
    /// A request of a dead path is not sent again: it counts as done.
    ReplayForgotten,
    /// With `until-remount` one FLUSH that fails ends a loss.
    LossToldOnce,
    /// A FLUSH that the target failed is no loss for the other users of the disk.
    LossOfFlush,
    /// The next process of a mount does not know of a loss.
    LossNotInherited,
    /// A returning holder is let in with any generation.
    FencingGeneration,
    /// OPEN is answered while commands of the holder before are under way.
    FencingWait,
    /// A start that fails notes that nothing is at risk.
    RecordOfFailedStart,
    /// A run notes that volumes are safe that it did not sync.
    RecordOfOthers,
    /// A change of the cache mode changes the verifier of the next run.
    RecordOfCacheMode,
    /// A store that loses writes is noted for the volumes of all stores.
    RecordOfNeighbours,
    /// OPEN in a new generation is answered before the writes of the previous holder are durable.
    OpenUnsettled,
    /// DROP is answered while connections of its epochs are left.
    WayDropEarly,
    /// Only the first poll group ends the connections of an epoch that is dropped.
    WayDropForgetsGroup,
    /// A LOGIN in an epoch that was dropped before is accepted.
    WayLateLogin,
    /// A LOGIN that resumes a session lets its older epochs live.
    WayResumeKeeps,
    /// A write of a dead way is sent again before the target has ended its epoch.
    WaySkipsDrop,
    /// A request of a dead way is sent again while its QPs are not destroyed.
    WayReadEarly,
    /// The path of a way keeps the requests that another way has sent since: an answer of it ends
    /// them, and so does its death.
    WayAnyAnswer,
    /// A LOGIN that joins a session of another run of the target is accepted, by both ends.
    WayOtherRun,
    /// A join does not take its number: neither the note nor the next try knows of it.
    WayEpochAgain,
    /// The lease of a session begins when one of its ways dies.
    WayLease,
    /// A take-over ends the newest epoch of the holder alone, and waits for no other.
    WayFenceOne,
    /// While the target may still do a request of a dead way, no request is sent.
    WayStopsOthers,
    /// A member of a group serves an image before its client has the map of OSDs that fences the
    /// owner before.
    GroupServesBeforeMap,
    /// A member takes an image again that it has lost, and does not fence the client that it had
    /// before.
    GroupReopensEarly,
    /// The object beside an image is changed without a comparison.
    GroupStateBlindWrite,
    /// A member hands an image over, notes that nothing is at risk, and has not written its dirty
    /// blocks.
    GroupCleanLie,
    /// A member answers from its cache although nothing proves its lock any more.
    GroupHitAfterLoss,
    /// A member becomes the owner of an image although another one was faster.
    GroupTwoClaims,
    /// A member lets a host in again without a proof that it is still the owner.
    GroupOpensUnproven,
    /// A member lets other hosts in while the owner before may answer the holder from its cache.
    GroupOthersAtOnce,
}

impl Mutation {
    /// Every mutation, with its name.
    pub const ALL: [(Self, &'static str); 41] = [
        (Self::EpochOrderLogin, "epoch_order_login"),
        (Self::EpochOrderBurial, "epoch_order_burial"),
        (Self::BufferReuseTarget, "buffer_reuse_target"),
        (Self::BufferReuseInitiator, "buffer_reuse_initiator"),
        (Self::DestroyTarget, "destroy_target"),
        (Self::DestroyInitiator, "destroy_initiator"),
        (Self::FlushScopeAnswer, "flush_scope_answer"),
        (Self::FlushScopeShard, "flush_scope_shard"),
        (Self::ReplayOldest, "replay_oldest"),
        (Self::ReplaySilentLoss, "replay_silent_loss"),
        (Self::ReplayForgotten, "replay_forgotten"),
        (Self::LossToldOnce, "loss_told_once"),
        (Self::LossOfFlush, "loss_of_flush"),
        (Self::LossNotInherited, "loss_not_inherited"),
        (Self::FencingGeneration, "fencing_generation"),
        (Self::FencingWait, "fencing_wait"),
        (Self::RecordOfFailedStart, "record_of_failed_start"),
        (Self::RecordOfOthers, "record_of_others"),
        (Self::RecordOfCacheMode, "record_of_cache_mode"),
        (Self::RecordOfNeighbours, "record_of_neighbours"),
        (Self::OpenUnsettled, "open_unsettled"),
        (Self::WayDropEarly, "way_drop_early"),
        (Self::WayDropForgetsGroup, "way_drop_forgets_group"),
        (Self::WayLateLogin, "way_late_login"),
        (Self::WayResumeKeeps, "way_resume_keeps"),
        (Self::WaySkipsDrop, "way_skips_drop"),
        (Self::WayReadEarly, "way_read_early"),
        (Self::WayAnyAnswer, "way_any_answer"),
        (Self::WayOtherRun, "way_other_run"),
        (Self::WayEpochAgain, "way_epoch_again"),
        (Self::WayLease, "way_lease"),
        (Self::WayFenceOne, "way_fence_one"),
        (Self::WayStopsOthers, "way_stops_others"),
        (Self::GroupServesBeforeMap, "group_serves_before_map"),
        (Self::GroupReopensEarly, "group_reopens_early"),
        (Self::GroupStateBlindWrite, "group_state_blind_write"),
        (Self::GroupCleanLie, "group_clean_lie"),
        (Self::GroupHitAfterLoss, "group_hit_after_loss"),
        (Self::GroupTwoClaims, "group_two_claims"),
        (Self::GroupOpensUnproven, "group_opens_unproven"),
        (Self::GroupOthersAtOnce, "group_others_at_once"),
    ];

    /// Whether this fault is switched on. Never, without the feature `mutations`.
    #[inline(always)]
    #[must_use]
    pub fn is_on(self) -> bool {
        #[cfg(feature = "mutations")]
        {
            switched_on() == Some(self)
        }
        #[cfg(not(feature = "mutations"))]
        {
            false
        }
    }
}

/// The fault that `RBLK_MUTATION` names.
///
/// # Panics
/// `RBLK_MUTATION` names no mutation.
#[cfg(feature = "mutations")]
fn switched_on() -> Option<Mutation> {
    static ON: std::sync::OnceLock<Option<Mutation>> = std::sync::OnceLock::new();
    *ON.get_or_init(|| {
        let name = std::env::var("RBLK_MUTATION").ok()?;
        let found = Mutation::ALL.iter().find(|(_, known)| *known == name);
        assert!(found.is_some(), "RBLK_MUTATION={name}: there is no mutation of this name");
        found.map(|(mutation, _)| *mutation)
    })
}
