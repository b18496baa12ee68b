//! Counters of one I/O queue.

use serde::{Deserialize, Serialize};

rblk_runtime::counters! {
    /// Counters of one queue. Its thread writes them; every thread may read them.
    #[derive(Debug, Default)]
    #[repr(align(128))]
    pub struct QueueCounters;

    /// The counters at one moment, or their sum over queues.
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
    #[serde(default)]
    pub struct QueueCounts;

    /// READs answered.
    reads,
    /// WRITEs answered.
    writes,
    /// FLUSHes answered.
    flushes,
    /// DISCARDs answered.
    discards,
    /// WRITE_ZEROES answered.
    write_zeroes,
    /// Bytes read.
    read_bytes,
    /// Bytes written.
    written_bytes,
    /// Writes with their data in the command: no key was exposed.
    in_capsule_writes,
    /// Commands that named a remote key.
    keyed_commands,
    /// Requests answered with an error.
    errors,
    /// Unanswered requests at the moment.
    in_flight,
    /// Damaged data and answers: their digests did not match.
    digest_mismatches,
    /// Requests sent once again after a digest mismatch.
    digest_retries,
    /// Requests sent again on another path.
    replayed,
    /// FLUSHes sent ahead of a write, to make room for retained writes.
    flushes_ahead,
    /// Paths that ended.
    paths_lost,
    /// KEEP_ALIVEs sent on the queue's own connection, because awaited answers did not come.
    beats,
    /// SENDs posted.
    sends,
    /// SENDs that asked for a completion.
    signaled,
    /// Doorbells.
    send_doorbells,
    /// Posts of a list of RECVs.
    recv_doorbells,
    /// RECVs posted.
    recvs,
    /// Completions reaped.
    completions,
    /// Answers that came as WRITE_WITH_IMM.
    immediates,
    /// Bytes the initiator's CPU copied between buffers.
    copied_bytes,
    /// Bytes of requests with data in shared memory, or in the memory of a guest: nothing on this
    /// host copied them.
    shared_memory_bytes,
    /// Bytes of a guest's requests that were copied between its memory and a buffer.
    bounced_bytes,
    /// Turns of the data thread.
    turns,
    /// Times the data thread slept.
    sleeps,
    /// io_uring_enter calls.
    ring_enters,
    /// Times the data thread yielded its CPU while it polled.
    yields,
    /// Times the CQ was armed. An armed CQ is not armed again.
    arms,
    /// Events of the CQ.
    events,
    /// Calls of the software provider into its links and epoll; over TCP each is a system call.
    link_calls,
    /// Encrypted connections that ended because of a changed or invalid record. Counts paths that
    /// have ended.
    bad_records,
    /// SENDs that carried several commands.
    lists,
    /// Commands in these SENDs.
    listed,
}
