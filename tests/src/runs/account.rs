//! [`Account`]: whether writes of a volume could be gone. The account does not read records.

use rblk_target::record::AtRisk;

/// The account of one volume. See the module above.
#[derive(Clone, Debug)]
pub struct Account {
    exposed: AtRisk,
    causes: u64,
    last: &'static str,
    // The verifier of this run is not in the record.
    is_unkept: bool,
    // Writes are lost, and that could be noted nowhere.
    is_hidden: bool,
    // The volume lost writes in this run.
    is_lost: bool,
    // The process died while it wrote the record, or the write failed: the record may not be
    // durable.
    is_torn: bool,
}

impl Default for Account {
    fn default() -> Self {
        Self {
            exposed: AtRisk::Nothing,
            causes: 0,
            last: "nothing",
            is_unkept: false,
            is_hidden: false,
            is_lost: false,
            is_torn: false,
        }
    }
}

impl Account {
    /// How often writes could be gone so far.
    #[must_use]
    pub fn causes(&self) -> u64 {
        self.causes
    }

    /// The place of writes that are not durable.
    #[must_use]
    pub fn exposed(&self) -> AtRisk {
        self.exposed
    }

    /// The last event.
    #[must_use]
    pub fn last(&self) -> &'static str {
        self.last
    }

    /// Counts an event that could lose writes.
    pub fn count(&mut self, why: &'static str) {
        (self.causes, self.last) = (self.causes + 1, why);
    }

    /// Notes that hosts may write, and that this risk applies to their writes.
    pub fn expose(&mut self, risk: AtRisk) {
        self.exposed = self.exposed.max(risk);
    }

    /// Notes that writes not at this risk are durable now, as the record shows.
    pub fn lower(&mut self, risk: AtRisk) {
        self.exposed = self.exposed.min(risk);
    }

    /// Restores the risk from before a change that failed.
    pub fn restore(&mut self, exposed: AtRisk) {
        self.exposed = exposed;
    }

    /// Whether the record has the verifier of this run.
    pub fn set_kept(&mut self, is_kept: bool) {
        (self.is_unkept, self.is_torn) = (!is_kept, !is_kept);
    }

    /// The process died while it wrote the record, or the write failed.
    pub fn tear(&mut self) {
        self.is_torn = true;
    }

    /// Writes were lost. `is_noted`: the next run will certainly know.
    pub fn lose(&mut self, is_noted: bool) {
        self.count("the store lost writes");
        (self.is_lost, self.is_hidden) = (true, !is_noted);
    }

    /// The same run serves the volume again after its removal. Writes to a store that had lost
    /// writes had no guarantee.
    pub fn served_anew(&mut self) {
        if std::mem::take(&mut self.is_lost) {
            self.count("the store had lost writes");
        }
    }

    /// A later attempt to note the loss has succeeded.
    pub fn noted(&mut self) {
        self.is_hidden = false;
    }

    /// The process has ended. Returns whether a loss stays hidden.
    #[must_use]
    pub fn end_process(&mut self) -> bool {
        let is_unkept = std::mem::take(&mut self.is_unkept);
        if is_unkept {
            self.count("the record was not written");
        }
        self.served_anew();
        if self.exposed == AtRisk::Process {
            self.count("the process died");
            // The record may name an earlier run, whose writes the kernel has.
            self.exposed = if is_unkept { AtRisk::Machine } else { AtRisk::Nothing };
        }
        std::mem::take(&mut self.is_hidden)
    }

    /// The machine has lost its power.
    pub fn cut(&mut self) {
        if self.exposed != AtRisk::Nothing {
            self.count("the machine died");
        } else if self.is_torn {
            self.count("a power cut took a record back");
        }
        self.is_torn = false;
        self.exposed = AtRisk::Nothing;
    }
}
