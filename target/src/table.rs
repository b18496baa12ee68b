//! Tables for people.

use std::fmt::Write;

use rblk_config::ByteSize;
use rblk_target::control::status::TargetStatus;

/// The state of a target.
pub(crate) fn status(status: &TargetStatus) -> String {
    let mut text = String::new();
    let state = if status.draining { "draining" } else { "serving" };
    // Writing to a String cannot fail.
    let _ = writeln!(
        text,
        "target {} ({state}, pid {}, version {}, up {} s)",
        status.name, status.pid, status.version, status.uptime_s
    );
    let _ = writeln!(text, "listening on {}", status.listen.join(", "));
    for device in &status.devices {
        let _ = writeln!(text, "device {} ({})", device.name, device.transport);
    }
    let _ = writeln!(
        text,
        "\n{:<20} {:<7} {:>10} {:>6} {:<6} {:<6} BACKING",
        "VOLUME", "STORE", "SIZE", "BLOCK", "MODE", "IN USE"
    );
    for v in &status.volumes {
        let _ = writeln!(
            text,
            "{:<20} {:<7} {:>10} {:>6} {:<6} {:<6} {}",
            v.name,
            v.store,
            ByteSize(v.size_bytes).to_string(),
            v.block_size,
            if v.read_only { "ro" } else { "rw" },
            if v.in_use { "yes" } else { "no" },
            v.notes.path.as_deref().unwrap_or("-")
        );
    }
    let _ = writeln!(
        text,
        "\n{:<20} {:<24} {:>6} {:>12} VOLUMES",
        "SESSION OF", "FROM", "EPOCH", "CONNECTIONS"
    );
    for s in &status.sessions {
        let _ = writeln!(
            text,
            "{:<20} {:<24} {:>6} {:>12} {}",
            s.host,
            s.peer,
            s.epoch,
            s.connections,
            s.volumes.join(", ")
        );
    }
    let t = &status.total;
    let _ = writeln!(
        text,
        "\ncommands: {} reads, {} writes ({} in capsule), {} flushes, {} discards, {} write-zeroes, {} failed",
        t.reads,
        t.writes,
        t.in_capsule_writes,
        t.flushes,
        t.discards,
        t.write_zeroes,
        t.failed_commands
    );
    let _ = writeln!(
        text,
        "messages: {} SEND, {} WRITE, {} WRITE_WITH_IMM, {} READ, {} signaled, {} doorbells, {} completions",
        t.sends,
        t.rdma_writes,
        t.rdma_writes_with_imm,
        t.rdma_reads,
        t.signaled,
        t.send_doorbells,
        t.completions
    );
    text
}
