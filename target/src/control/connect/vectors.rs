//! [`Vectors`]: the interrupt vector of a device for each poll group.
//!
//! An interrupt wakes a poll group that sleeps. It should come to the CPU where the poll group
//! runs. Most drivers give their vectors to CPUs one after the other: first to those of the
//! device's NUMA node, then to the others (`cpumask_local_spread` in the kernel's lib/cpumask.c).
//! So a poll group that has a CPU (`cpus`) takes the vector that such a driver gives to that CPU.
//! Others take turns. A wrong guess costs an interrupt on another CPU.

use rblk_fabric::CompletionVector;
use rblk_operate::{CpuList, near_cpus};
use rblk_protocol::width::narrow;

/// The vectors of poll groups.
#[derive(Debug)]
pub(in crate::control) struct Vectors {
    // By poll group, if they have CPUs.
    cpus: Vec<u16>,
}

impl Vectors {
    /// The vectors of poll groups that run on these CPUs.
    pub(in crate::control) fn of_cpus(cpus: Vec<u16>) -> Self {
        Self { cpus }
    }

    /// The vector for a poll group and the device of this name.
    pub(in crate::control) fn of(&self, group: usize, device: &str) -> CompletionVector {
        let Some(cpu) = self.cpus.get(group) else { return CompletionVector::Turn };
        near_to(*cpu, &near_cpus(device), &CpuList::online())
    }
}

/// The vector of a CPU, on a host that has `online` and a device that has `near`.
fn near_to(cpu: u16, near: &CpuList, online: &CpuList) -> CompletionVector {
    let others = online.iter().filter(|other| !near.has(*other));
    let first_near = near.iter().filter(|near| online.has(*near));
    match first_near.chain(others).position(|other| other == cpu) {
        Some(at) => CompletionVector::At(narrow(at)),
        None => CompletionVector::Turn,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn vectors_begin_at_the_node_of_the_device() {
        let list = |text: &str| text.parse::<CpuList>().unwrap();
        let of = |cpu, near: &str| near_to(cpu, &list(near), &list("0-3,8-11"));
        use CompletionVector::{At, Turn};
        assert_eq!(
            [8, 9, 11, 0, 3].map(|cpu| of(cpu, "8-15")),
            [At(0), At(1), At(3), At(4), At(7)]
        );
        // A device of no node, and a CPU that is not there.
        assert_eq!([0, 3, 8, 5].map(|cpu| of(cpu, "")), [At(0), At(3), At(4), Turn]);
    }

    #[test]
    fn poll_groups_without_cpus_take_turns() {
        let vectors = Vectors::of_cpus(vec![0]);
        assert_eq!(vectors.of(0, "none"), CompletionVector::At(0));
        assert_eq!(vectors.of(1, "none"), CompletionVector::Turn);
    }
}
