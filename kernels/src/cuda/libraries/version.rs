//! [`Version`] of a library.

use std::ffi::c_int;
use std::fmt;

/// A version of a library, or of CUDA.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Version {
    /// Incompatible when it differs.
    pub major: u32,
    /// Additions.
    pub minor: u32,
    /// Corrections; 0 where the library does not say.
    pub patch: u32,
}

impl Version {
    /// `major.minor.patch`.
    pub const fn new(major: u32, minor: u32, patch: u32) -> Self {
        Self {
            major,
            minor,
            patch,
        }
    }

    /// The driver and the runtime write 12.4 as 12040.
    pub(super) fn from_cuda(number: c_int) -> Self {
        let number = number.unsigned_abs();
        Self::new(number / 1000, number % 1000 / 10, number % 10)
    }

    /// NCCL, since 2.9, writes 2.28.9 as 22809; before it, 2.8.4 as 2804.
    pub(super) fn from_nccl(number: c_int) -> Self {
        let number = number.unsigned_abs();
        let unit = if number < 10_000 { 1000 } else { 10_000 };
        Self::new(number / unit, number % unit / 100, number % 100)
    }
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.major, self.minor)?;
        match self.patch {
            0 => Ok(()),
            patch => write!(f, ".{patch}"),
        }
    }
}
