//! The conformance cases over rdma_cm, on the device that has the address `RBLK_TEST_RDMA_ADDR`.
//!
//! The tests are ignored unless `--ignored` asks for them. Without that variable they then fail and
//! say how to run them.
#![cfg(feature = "verbs")]

mod conformance;
mod verbs_pair;

use conformance::{CASES, Expect, Pair, limits, remote_wrap_around, wr};
use rblk_fabric::{Access, Address, ConnectOptions, Route, SendOp, Transport, WcStatus};
use verbs_pair::{address, control, pair};

/// Cases a transport cannot pass, each with why. Everything else must.
fn exempt(transport: Transport, name: &str) -> Option<&'static str> {
    Some(match (transport, name) {
        (Transport::Iwarp, "immediate_arrives" | "immediate_without_recv_is_rnr") => {
            "iWARP has no immediates"
        }
        (Transport::Iwarp, "scatter" | "reads_among_messages") => "an iWARP READ has one sink",
        (
            Transport::Iwarp,
            "no_recv_is_rnr" | "recv_too_short" | "recv_memory_bad" | "bad_rkey" | "wrong_access"
            | "remote_bounds" | "remote_wrap_around",
        ) => "an iWARP WR is done when TCP has it; refusals come as the end of the connection",
        (Transport::Iwarp, "local_protection_after_good_ones") => "siw calls it LOC_QP_OP_ERR",
        (Transport::Iwarp, "peer_death") => "siw loses WRs posted to a QP that has just died",
        (Transport::Roce, "no_recv_is_rnr" | "peer_death") => {
            "the two queues of a QP flush in no common order"
        }
        (Transport::Roce, "recv_too_short") => "rxe answers with a remote operational error",
        (Transport::Roce, "recv_memory_bad") => "rxe calls it LOC_QP_OP_ERR at the receiver",
        (Transport::Roce, "local_protection_after_good_ones") => {
            "rxe checks ahead, and flushes the WRs before the bad one too"
        }
        _ => return None,
    })
}

#[test]
#[ignore = "needs an RDMA device: `cargo xtask test` runs it in the lab"]
fn over_verbs() {
    let address = address();
    let to = Address { port: 1, ..address.clone() };
    let route = control().block_on(Route::resolve(&to, &ConnectOptions::default())).unwrap();
    let caps = route.device().caps().clone();
    let facts = route.device().facts(1).unwrap().expect("a device has facts");
    drop(route);
    let expect = Expect {
        rnr: WcStatus::RnrRetryExceeded,
        // A device holds them back.
        read_depth_refused: false,
        responder_dies: true,
        peer_death: vec![WcStatus::Flushed, WcStatus::RetryExceeded],
        dead_region: true,
        // An iWARP WR is done when TCP has it.
        refusal_is_told: caps.transport != Transport::Iwarp,
        // Soft-RoCE loses one now and then.
        refusal_may_be_lost: caps.transport == Transport::Roce,
        immediates: caps.write_with_imm,
    };
    let extra = [("remote_wrap_around", remote_wrap_around as fn(&mut Pair, &Expect))];
    let mut failed = Vec::new();
    for (name, case) in CASES.iter().chain(&extra) {
        let scatters = matches!(*name, "scatter" | "reads_among_messages");
        let one_sink = scatters && facts.max_read_sges < 2;
        let one_sink = one_sink.then_some("a READ of this device has one sink");
        if let Some(reason) = exempt(caps.transport, name).or(one_sink) {
            println!("{name}: left out on {}: {reason}", caps.name);
            continue;
        }
        let mut pair = pair(&address, limits(), limits());
        let run = std::panic::AssertUnwindSafe(|| case(&mut pair, &expect));
        if std::panic::catch_unwind(run).is_err() {
            failed.push(*name);
        }
    }
    assert!(failed.is_empty(), "on {}: {failed:?} failed", caps.name);
}

/// The cases of a death that depend on no order between the queues.
#[test]
#[ignore = "needs an RDMA device: `cargo xtask test` runs it in the lab"]
fn all_is_completed_at_death() {
    let address = address();
    for by_peer in [false, true] {
        let mut p = pair(&address, limits(), limits());
        let memory = p.a.memory(1 << 20, Access::REMOTE);
        let window = p.b.memory(1 << 20, Access::REMOTE);
        for id in 10..14 {
            p.a.recv(id, memory.sge(0, 64).unwrap());
        }
        // Large enough to be under way when the end comes.
        let write = |id| {
            let sge = memory.sge(0, 1 << 20).unwrap();
            wr(id, SendOp::Write(window.remote(0)), sge, true)
        };
        p.a.post(&[write(0), write(1), write(2), write(3)]);
        if by_peer {
            p.b.poller.fail(p.b.qp);
        } else {
            p.a.poller.fail(p.a.qp);
        }
        p.until_a(8);
        p.settle();
        let mut ids: Vec<_> = p.a.seen.iter().map(|c| c.id.0).collect();
        ids.sort_unstable();
        assert_eq!(ids, [0, 1, 2, 3, 10, 11, 12, 13]);
        let recvs = p.a.seen.iter().filter(|c| c.id.0 >= 10);
        assert!(recvs.clone().all(|c| c.status == WcStatus::Flushed), "{:?}", p.a.seen);
    }
}
