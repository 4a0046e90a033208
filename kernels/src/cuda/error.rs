//! [`DeviceError`]: what went wrong on a device, and how it travels.
//!
//! Ops return tensors, not results: a device fails at any launch, copy or allocation, and a layer
//! could do nothing about it but pass it up. So a failure unwinds with a typed payload, without a
//! panic's message, to where a rank's work was started; [`catch`] turns it into a result there.

use std::fmt;
use std::panic::{self, AssertUnwindSafe};

/// The driver's name for memory having run out.
const OUT_OF_MEMORY: &str = "CUDA_ERROR_OUT_OF_MEMORY";

/// A call to a device's libraries that failed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeviceError {
    /// The call, by the library's own name for it (`cuLaunchKernel`).
    pub call: &'static str,
    /// Its numeric code and the library's name for that (`CUDA_ERROR_OUT_OF_MEMORY`), where it gave
    /// one.
    pub code: Option<(i64, String)>,
    /// The op that was running, where there was one (`grouped_gemm::forward`).
    pub op: Option<&'static str>,
    /// What was being done, what was found and what would work.
    pub detail: String,
}

impl DeviceError {
    /// A call that failed without a code.
    pub fn new(call: &'static str, detail: impl Into<String>) -> Self {
        Self {
            call,
            code: None,
            op: None,
            detail: detail.into(),
        }
    }

    /// Device memory ran out, as the driver says it.
    pub(crate) fn out_of_memory(call: &'static str, detail: String) -> Self {
        let code = Some((2, OUT_OF_MEMORY.to_owned()));
        Self {
            code,
            ..Self::new(call, detail)
        }
    }

    /// Whether device memory ran out.
    pub(crate) fn is_out_of_memory(&self) -> bool {
        let code = self.code.as_ref();
        code.is_some_and(|(_, name)| name == OUT_OF_MEMORY)
    }

    /// The same failure, during `op` (the innermost op wins).
    pub(crate) fn during(mut self, op: &'static str) -> Self {
        self.op.get_or_insert(op);
        self
    }

    /// Unwinds to the nearest [`catch`].
    pub(crate) fn raise(self) -> ! {
        panic::resume_unwind(Box::new(self))
    }
}

impl fmt::Display for DeviceError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(op) = self.op {
            write!(f, "{op}: ")?;
        }
        write!(f, "{}", self.call)?;
        if let Some((code, name)) = &self.code {
            write!(f, " failed with {code} ({name})")?;
        }
        write!(f, ": {}", self.detail)
    }
}

impl std::error::Error for DeviceError {}

/// Runs `body`; a failure of a device inside it becomes an error, any other panic goes on.
pub fn catch<R>(body: impl FnOnce() -> R) -> Result<R, DeviceError> {
    // Tensors and devices that `body` made die in the unwinding; what it borrowed is the caller's to
    // drop, as after any failed run.
    panic::catch_unwind(AssertUnwindSafe(body)).map_err(|payload| {
        match payload.downcast::<DeviceError>() {
            Ok(error) => *error,
            Err(other) => panic::resume_unwind(other),
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_raised_error_is_caught_with_its_op_and_a_panic_is_not() {
        let failed = || -> i32 {
            let mut error = DeviceError::new("cuMemAlloc", "asked for 2 GiB, 1 GiB is free");
            error.code = Some((2, "CUDA_ERROR_OUT_OF_MEMORY".to_owned()));
            error.during("gemm::forward").during("outer").raise()
        };
        let error = catch(failed).expect_err("it was raised");
        assert_eq!(
            error.to_string(),
            "gemm::forward: cuMemAlloc failed with 2 (CUDA_ERROR_OUT_OF_MEMORY): \
             asked for 2 GiB, 1 GiB is free"
        );
        assert_eq!(catch(|| 3), Ok(3));
        let other = panic::catch_unwind(|| catch(|| panic::resume_unwind(Box::new("defect"))));
        let payload = other.expect_err("another panic passes through");
        assert_eq!(payload.downcast_ref::<&str>(), Some(&"defect"));
    }
}
