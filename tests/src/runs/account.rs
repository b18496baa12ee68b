//! [`Account`]: whether something of a volume could be gone. It knows nothing of records.

use rblk_target::record::AtRisk;

/// Of one volume. See the module above.
#[derive(Clone, Debug)]
pub struct Account {
    exposed: AtRisk,
    causes: u64,
    last: &'static str,
    // The verifier of this run is not in the record.
    is_unkept: bool,
    // Writes are lost, and that could be noted nowhere.
    is_hidden: bool,
    // It lost writes in this run.
    is_lost: bool,
    // The process died while it wrote the record, or the write failed: what is there may not be
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
    /// How often something could be gone so far.
    #[must_use]
    pub fn causes(&self) -> u64 {
        self.causes
    }

    /// Where writes may be that are not durable.
    #[must_use]
    pub fn exposed(&self) -> AtRisk {
        self.exposed
    }

    /// What happened last.
    #[must_use]
    pub fn last(&self) -> &'static str {
        self.last
    }

    /// Something could be gone.
    pub fn count(&mut self, why: &'static str) {
        (self.causes, self.last) = (self.causes + 1, why);
    }

    /// Hosts may write so that this is at risk.
    pub fn expose(&mut self, risk: AtRisk) {
        self.exposed = self.exposed.max(risk);
    }

    /// What is not at this risk is durable, and that is noted.
    pub fn lower(&mut self, risk: AtRisk) {
        self.exposed = self.exposed.min(risk);
    }

    /// As it was before a change that failed.
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

    /// Writes were lost. Whether the next run is certain to know.
    pub fn lose(&mut self, is_noted: bool) {
        self.count("the store lost writes");
        (self.is_lost, self.is_hidden) = (true, !is_noted);
    }

    /// The volume is served by the same run again, after it was removed. What was written to a
    /// store that had lost writes counted on nothing.
    pub fn served_anew(&mut self) {
        if std::mem::take(&mut self.is_lost) {
            self.count("the store had lost writes");
        }
    }

    /// A later try to note the loss has succeeded.
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
            // What is kept may speak of an earlier run, whose writes the kernel has.
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
