//! [`Fault`]: what the emulator found wrong with a kernel.

use std::fmt;

/// A kernel did what no correct one does.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Fault {
    pub(crate) kind: Kind,
    /// Everything there is to say: who, where, what, and what came before.
    pub(crate) detail: String,
}

/// Which detector spoke.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    /// Bytes were read that nobody wrote.
    Uninitialized,
    /// An address in no allocation, or not of the kind that the access needs, or in memory of another
    /// rank where it is written.
    OutOfBounds,
    /// An address that is no multiple of what the access needs.
    Misaligned,
    /// Two accesses, one a write, with nothing that orders them.
    Race,
    /// The asynchronous proxy reads a plain write that was not fenced.
    Unfenced,
    /// Memory or registers of an operation still in flight were touched, or never waited for.
    InFlight,
    /// Threads wait for what cannot come.
    Deadlock,
    /// A barrier was used against its count, its id or its state.
    Barrier,
    /// Lanes of a warp called different collective operations.
    Divergence,
    /// An operand that the hardware does not take.
    Operand,
    /// Two pieces of work of different streams, one of which writes what the other uses, and neither
    /// waits for the other.
    Unordered,
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kind = match self.kind {
            Kind::Uninitialized => "read of uninitialized memory",
            Kind::OutOfBounds => "access out of bounds",
            Kind::Misaligned => "misaligned access",
            Kind::Race => "data race",
            Kind::Unfenced => "missing fence_async",
            Kind::InFlight => "operation in flight",
            Kind::Deadlock => "deadlock",
            Kind::Barrier => "misused barrier",
            Kind::Divergence => "divergent warp",
            Kind::Operand => "bad operand",
            Kind::Unordered => "streams out of order",
        };
        write!(f, "{kind}: {}", self.detail)
    }
}
