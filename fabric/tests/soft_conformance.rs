//! The conformance cases over the software provider: TCP loopback, and the in-memory network under
//! many seeds and conditions.

mod conformance;
mod soft_pairs;

use conformance::{Expect, remote_wrap_around, run};
use rblk_fabric::WcStatus;
use rblk_fabric::soft::network::Conditions;
use soft_pairs::{memory_pair, tcp_pair};

fn expect() -> Expect {
    Expect {
        rnr: WcStatus::RnrRetryExceeded,
        read_depth_refused: true,
        responder_dies: true,
        peer_death: vec![WcStatus::Flushed, WcStatus::RetryExceeded],
        dead_region: true,
        refusal_is_told: true,
        refusal_may_be_lost: false,
        immediates: true,
    }
}

#[test]
fn over_tcp() {
    for _ in 0..3 {
        run(&expect(), tcp_pair);
        remote_wrap_around(&mut tcp_pair(conformance::limits(), conformance::limits()), &expect());
    }
}

#[test]
fn over_memory() {
    for seed in 0..40u64 {
        let conditions = Conditions {
            fragment: seed % 4 != 0,
            delay_min: seed % 3,
            delay_max: seed % 3 + seed % 7,
            buffer: [1000, 40_000, 256 << 10][usize::try_from(seed % 3).unwrap()],
        };
        let outcome = std::panic::catch_unwind(|| {
            run(&expect(), |a, b| memory_pair(seed, conditions, a, b).0);
            let limits = conformance::limits();
            remote_wrap_around(&mut memory_pair(seed, conditions, limits, limits).0, &expect());
        });
        if let Err(panic) = outcome {
            eprintln!("seed {seed}, {conditions:?}");
            std::panic::resume_unwind(panic);
        }
    }
}
