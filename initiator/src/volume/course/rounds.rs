//! [`Rounds`]: the order of the addresses in tries for a lost target. Every round tries each
//! address once.

/// The rounds of an outage.
#[derive(Clone, Debug)]
pub(super) struct Rounds {
    // The rest of the present round, in reverse order.
    left: Vec<usize>,
    // Rounds that failed since the target was last connected for long.
    failed: u32,
    // Addresses that lost a path or did not answer in time; the round tries them last.
    suspect: Vec<bool>,
    // An address to try before all others, once.
    first: Option<usize>,
}

impl Rounds {
    /// For so many addresses, none of them suspect.
    pub(super) fn new(addresses: usize) -> Self {
        let mut rounds =
            Self { left: Vec::new(), failed: 0, suspect: vec![false; addresses], first: None };
        rounds.begin();
        rounds
    }

    /// The number of addresses.
    pub(super) fn addresses(&self) -> usize {
        self.suspect.len()
    }

    /// Puts this address first in the next round.
    pub(super) fn prefer(&mut self, address: usize) {
        self.first = Some(address);
    }

    /// Begins a round.
    pub(super) fn begin(&mut self) {
        let first = self.first.take();
        let mut order: Vec<usize> = (0..self.suspect.len()).collect();
        order.sort_by_key(|&at| (Some(at) != first, self.suspect[at], at));
        order.reverse();
        self.left = order;
    }

    /// The next address to try. Starts a new round if this one is over.
    pub(super) fn next(&mut self) -> usize {
        if self.left.is_empty() {
            self.begin();
        }
        self.left.pop().unwrap_or(0)
    }

    /// A try failed. Returns whether the round is over.
    pub(super) fn try_failed(&mut self) -> bool {
        let is_over = self.left.is_empty();
        self.failed = self.failed.saturating_add(u32::from(is_over));
        is_over
    }

    /// Rounds that failed since [`Self::restart`].
    pub(super) fn failed(&self) -> u32 {
        self.failed
    }

    /// Tries the address again next, in this round.
    pub(super) fn again(&mut self, address: usize) {
        self.left.push(address);
    }

    /// The target was connected for long: earlier rounds do not count.
    pub(super) fn restart(&mut self) {
        self.failed = 0;
        self.left.clear();
    }

    /// Ends the present round.
    pub(super) fn clear(&mut self) {
        self.left.clear();
    }

    /// Marks an address as suspect, or clears the mark.
    pub(super) fn set_suspect(&mut self, address: usize, suspect: bool) {
        if let Some(mark) = self.suspect.get_mut(address) {
            *mark = suspect;
        }
    }

    /// Marks one address as suspect and clears all other marks: the newest information counts, and
    /// an address that was suspect before may work now.
    pub(super) fn suspect_only(&mut self, address: usize) {
        self.suspect.fill(false);
        self.set_suspect(address, true);
    }
}
