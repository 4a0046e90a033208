//! [`DeviceSpec`]: which device the ranks of a run compute on.
//!
//! Said once, before any rank starts; every rank opens its own [`Device`] on its own thread, since a
//! device is not `Send`. Ranks that are threads of one process share one GPU.

use std::thread;

use moefold_kernels::{Device, Dtype};
use moefold_profiles::units::Bytes;

use crate::error::Error;

/// A kind of device, and how the ranks of this machine use it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DeviceSpec {
    /// This machine's cores, in f32.
    Cpu {
        /// Threads of each rank; absent, the machine's cores are shared out evenly.
        threads_per_rank: Option<usize>,
    },
    /// A GPU that stores weights and activations in f32 or bf16.
    Cuda {
        /// Which of the two.
        dtype: Dtype,
        /// What every rank takes of its GPU's memory as it opens it: [`mod@crate::room`]. Absent, nothing
        /// until it is needed.
        reserve: Option<Bytes>,
    },
    /// CUDA made of software, as [`moefold_emulator::device`].
    #[cfg(test)]
    Emulated {
        /// The generation of GPU.
        architecture: moefold_kernels::cuda::Architecture,
        /// What weights and activations are stored in.
        dtype: Dtype,
        /// Where schedules are thrown from.
        seed: u64,
        /// As above.
        reserve: Option<Bytes>,
    },
}

impl DeviceSpec {
    /// This machine's cores, shared out among the ranks.
    pub const CPU: Self = Self::Cpu {
        threads_per_rank: None,
    };

    /// The device of one of `ranks` ranks that run on this machine; of several GPUs the one that the
    /// driver counts as `ordinal`. With it, memory that is to be reserved is.
    pub fn open(&self, ordinal: usize, ranks: u32) -> Result<Device, Error> {
        let (device, reserve) = match *self {
            Self::Cpu { .. } => (Ok(Device::cpu(self.threads_per_rank(ranks))), None),
            Self::Cuda { dtype, reserve } => (Device::cuda(ordinal, dtype), reserve),
            #[cfg(test)]
            Self::Emulated {
                architecture,
                dtype,
                seed,
                reserve,
            } => (moefold_emulator::device(architecture, dtype, seed), reserve),
        };
        let device = device.map_err(Error::Device)?;
        let reserved = reserve.map_or(Ok(()), |bytes| device.reserve(bytes));
        reserved.map_err(Error::Device)?;
        Ok(device)
    }

    /// Whether it is a GPU.
    pub fn is_gpu(&self) -> bool {
        !matches!(self, Self::Cpu { .. })
    }

    /// The kind of device, as on the command line.
    pub fn name(&self) -> &'static str {
        if self.is_gpu() { "cuda" } else { "cpu" }
    }

    /// What weights and activations are stored in.
    pub fn dtype(&self) -> Dtype {
        match *self {
            Self::Cpu { .. } => Dtype::F32,
            Self::Cuda { dtype, .. } => dtype,
            #[cfg(test)]
            Self::Emulated { dtype, .. } => dtype,
        }
    }

    /// Threads of this machine that the ops of each of `ranks` ranks run on.
    pub fn threads_per_rank(&self, ranks: u32) -> usize {
        let Self::Cpu { threads_per_rank } = *self else {
            return 1;
        };
        threads_per_rank.unwrap_or_else(|| (cores() / ranks.max(1) as usize).max(1))
    }

    /// Threads of `ranks` ranks for each core, where they compute on cores; 1 where there are enough.
    pub fn stretch(&self, ranks: u32) -> f64 {
        if !matches!(self, Self::Cpu { .. }) {
            return 1.0;
        }
        let threads = ranks as usize * self.threads_per_rank(ranks);
        f64::max(threads as f64 / cores() as f64, 1.0)
    }
}

/// Cores that this process may use, one where the system does not say.
pub(crate) fn cores() -> usize {
    thread::available_parallelism().map_or(1, std::num::NonZero::get)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn law_cores_are_shared_out_and_never_run_out() {
        let shared_out = DeviceSpec::Cpu {
            threads_per_rank: None,
        };
        for ranks in 1..=2 * cores() as u32 {
            let threads = shared_out.threads_per_rank(ranks);
            assert!(threads >= 1);
            let stretch = threads as f64 * f64::from(ranks) / cores() as f64;
            assert_eq!(shared_out.stretch(ranks), f64::max(stretch, 1.0));
            let device = shared_out.open(0, ranks).expect("there is a CPU");
            assert_eq!((device.name(), device.threads()), ("cpu", threads));
        }
        let asked = DeviceSpec::Cpu {
            threads_per_rank: Some(3),
        };
        assert_eq!(asked.threads_per_rank(1000), 3);
    }
}
