//! [`CompletionVector`]: the interrupt vector of a CQ.

/// Which interrupt vector of a device a CQ has: the interrupt that wakes its thread.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum CompletionVector {
    /// The next one. CQs take turns, and each process begins at another vector.
    Turn,
    /// This one, of as many as the device has: numbers beyond begin again.
    At(u32),
}
