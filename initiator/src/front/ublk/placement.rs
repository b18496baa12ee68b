//! [`Placement`]: places a thread on the CPUs of a hardware queue.
//!
//! A request comes to its queue on the CPU of the program that made it, and its answer is handed
//! back there. A thread on one of those CPUs is woken without an interrupt between CPUs, and finds
//! the request in the cache. The kernel reports which CPUs submit to a queue
//! (`UBLK_U_CMD_GET_QUEUE_AFFINITY`).

use nix::sched::{CpuSet, sched_getaffinity, sched_setaffinity};
use nix::unistd::Pid;

/// The CPUs that the calling thread may run on.
#[derive(Debug)]
pub(crate) struct Placement {
    allowed: Option<CpuSet>,
}

impl Placement {
    /// Those of now.
    pub(crate) fn of_this_thread() -> Self {
        Self { allowed: sched_getaffinity(Pid::from_raw(0)).ok() }
    }

    /// Keeps the calling thread on the allowed ones of these CPUs. Changes nothing if none is
    /// allowed, or if the kernel refuses.
    pub(crate) fn run_on(&self, cpus: &[usize]) {
        let set = self.allowed.as_ref().and_then(|allowed| chosen(cpus, allowed));
        if let Some(Err(error)) = set.map(|set| sched_setaffinity(Pid::from_raw(0), &set)) {
            tracing::debug!(%error, "cannot keep a queue's thread on its CPUs; it runs anywhere");
        }
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
            let mut cpus = (0..CpuSet::count()).filter(|&cpu| before.is_set(cpu) == Ok(true));
            let first = cpus.next().expect("a CPU");
            let last = cpus.next_back().unwrap_or(first);
            let none = CpuSet::count();
            let placement = Placement::of_this_thread();
            placement.run_on(&[first]);
            assert_eq!(sched_getaffinity(this), Ok(set(&[first])));
            placement.run_on(&[last, none]);
            assert_eq!(sched_getaffinity(this), Ok(set(&[last])), "from one queue to the next");
            placement.run_on(&[none]);
            assert_eq!(sched_getaffinity(this), Ok(set(&[last])), "it may not run there");
        })
        .join()
        .expect("the thread");
    }
}
