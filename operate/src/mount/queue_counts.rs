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
    reads: Counter Number => "rblk_mount_requests_total" { op = "read" }
        "Requests answered, by kind.",
    /// WRITEs answered.
    writes: Counter Number => "rblk_mount_requests_total" { op = "write" },
    /// FLUSHes answered.
    flushes: Counter Number => "rblk_mount_requests_total" { op = "flush" },
    /// DISCARDs answered.
    discards: Counter Number => "rblk_mount_requests_total" { op = "discard" },
    /// WRITE_ZEROES answered.
    write_zeroes: Counter Number => "rblk_mount_requests_total" { op = "write_zeroes" },
    /// Bytes read.
    read_bytes: Counter Bytes => "rblk_mount_read_bytes_total",
    /// Bytes written.
    written_bytes: Counter Bytes => "rblk_mount_written_bytes_total",
    /// Writes with their data in the command: no key was exposed.
    in_capsule_writes: Counter Number,
    /// Commands that named a remote key.
    keyed_commands: Counter Number,
    /// Requests answered with an error.
    errors: Counter Number => "rblk_mount_errors_total",
    /// Requests that are not answered.
    in_flight: Gauge Number => "rblk_mount_requests_in_flight",
    /// Data and answers that were changed on the way.
    ///
    /// Their digests did not match.
    digest_mismatches: Counter Number => "rblk_mount_digest_mismatches_total",
    /// Requests sent again because of that.
    digest_retries: Counter Number => "rblk_mount_digest_retries_total",
    /// Requests sent again on another path.
    replayed: Counter Number => "rblk_mount_replayed_total",
    /// FLUSHes sent ahead of a write, to make room for retained writes.
    flushes_ahead: Counter Number,
    /// Paths that ended.
    paths_lost: Counter Number => "rblk_mount_paths_lost_total",
    /// KEEP_ALIVEs sent on the queue's own connection, because awaited answers did not come.
    beats: Counter Number,
    /// SENDs posted.
    sends: Counter Number,
    /// SENDs that asked for a completion.
    signaled: Counter Number,
    /// Doorbells.
    send_doorbells: Counter Number,
    /// Posts of a list of RECVs.
    recv_doorbells: Counter Number,
    /// RECVs posted.
    recvs: Counter Number,
    /// Completions reaped.
    completions: Counter Number,
    /// Answers that came as WRITE_WITH_IMM.
    immediates: Counter Number,
    /// Bytes that the CPU copied between buffers.
    copied_bytes: Counter Bytes => "rblk_mount_copied_bytes_total",
    /// Bytes of requests with shared memory or a guest's, which nothing on this host copied.
    shared_memory_bytes: Counter Bytes => "rblk_mount_shared_memory_bytes_total",
    /// Bytes that were copied between the memory of a guest and a buffer.
    bounced_bytes: Counter Bytes => "rblk_mount_bounced_bytes_total",
    /// Turns of the queue threads.
    turns: Counter Number => "rblk_mount_turns_total",
    /// Times a queue thread slept.
    sleeps: Counter Number => "rblk_mount_sleeps_total",
    /// io_uring_enter calls.
    ring_enters: Counter Number,
    /// Times the data thread yielded its CPU while it polled.
    yields: Counter Number,
    /// Times the CQ was armed. An armed CQ is not armed again.
    arms: Counter Number,
    /// Events of the CQ.
    events: Counter Number,
    /// Calls of the software provider into its links and epoll; over TCP each is a system call.
    link_calls: Counter Number,
    /// Encrypted connections that ended because of a changed or invalid record. Counts paths that
    /// have ended.
    bad_records: Counter Number,
    /// SENDs that carried several commands.
    lists: Counter Number,
    /// Commands in these SENDs.
    listed: Counter Number,
}
