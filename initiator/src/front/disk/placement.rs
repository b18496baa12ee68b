//! [`run_on`]: places the thread of a hardware queue on CPUs.
//!
//! A request comes to its queue on the CPU of the program that made it, and its answer is handed
//! back there. A thread on one of those CPUs is woken without an interrupt between CPUs, and finds
//! the request in the cache. The kernel reports which CPUs submit to a queue
//! (`UBLK_U_CMD_GET_QUEUE_AFFINITY`).

use nix::sched::{CpuSet, sched_getaffinity, sched_setaffinity};
use nix::unistd::Pid;

/// Keeps the calling thread on the allowed ones of these CPUs. Changes nothing if none is allowed,
/// or if the kernel refuses.
pub(super) fn run_on(cpus: &[usize]) {
    let this = Pid::from_raw(0);
    let kept = sched_getaffinity(this).and_then(|allowed| match chosen(cpus, &allowed) {
        Some(set) => sched_setaffinity(this, &set),
        None => Ok(()),
    });
    if let Err(error) = kept {
        tracing::debug!(%error, "cannot keep a queue's thread on its CPUs; it runs anywhere");
    }
}

/// The allowed CPUs of `wanted`. `None` if there is none.
fn chosen(wanted: &[usize], allowed: &CpuSet) -> Option<CpuSet> {
    let mut set = CpuSet::new();
    let mut any = false;
    for &cpu in wanted {
        // An error means a CPU beyond the bits of the set.
        if allowed.is_set(cpu) == Ok(true) && set.set(cpu).is_ok() {
            any = true;
        }
    }
    any.then_some(set)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn set(cpus: &[usize]) -> CpuSet {
        let mut set = CpuSet::new();
        cpus.iter().for_each(|&cpu| set.set(cpu).expect("a CPU"));
        set
    }

    #[test]
    fn only_cpus_that_are_allowed_are_chosen() {
        assert_eq!(chosen(&[0, 1, 2], &set(&[1, 2, 3])), Some(set(&[1, 2])));
        assert_eq!(chosen(&[0], &set(&[1])), None, "none of them");
        assert_eq!(chosen(&[], &set(&[1])), None, "none is wanted");
        assert_eq!(chosen(&[1, 1_000_000], &set(&[1])), Some(set(&[1])), "no such CPU");
    }

    #[test]
    fn a_thread_stays_on_the_cpus_of_its_queue() {
        std::thread::spawn(|| {
            let this = Pid::from_raw(0);
            let before = sched_getaffinity(this).expect("the CPUs of the thread");
            let first = (0..CpuSet::count()).find(|&cpu| before.is_set(cpu) == Ok(true));
            let first = first.expect("a CPU");
            run_on(&[first]);
            assert_eq!(sched_getaffinity(this), Ok(set(&[first])));
            run_on(&[first + 1]);
            assert_eq!(sched_getaffinity(this), Ok(set(&[first])), "it may not run there");
        })
        .join()
        .expect("the thread");
    }
}
