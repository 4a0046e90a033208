//! The meta device: shapes, dtypes and the account of memory, but no memory, and ops that compute nothing.
//!
//! PyTorch calls this the meta device, JAX abstract evaluation. A program that runs on it unchanged says
//! what it would allocate and which ops it would run, in order ([`crate::observe`]), at any size. It stands
//! for the CPU or for a GPU: an op runs the host side of that device, workspaces and choice of kernels
//! included, and stops where memory would be read or a kernel launched. What is read from it is zero. The
//! one thing that a training step's shapes depend on, how many rows each expert gets, is assumed
//! ([`Device::assume_routing`]).

use std::rc::Rc;

use moefold_profiles::Dtype;

use crate::cuda::Cuda;
use crate::cuda::error::DeviceError;
use crate::cuda::platform::{Address, Dense, Launch, Lent, Module, Platform, Properties};
use crate::cuda::program::{EncodedMap, Program, TensorMap};
use crate::device::{Backend, Device};
use crate::parallel::Cpu;

/// Where memory that does not exist begins: aligned as a GPU's is.
pub(crate) const NOWHERE: Address = Address(1 << 20);

/// The choices of one router: rows of `[tokens, slots]` among `experts`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Choices {
    /// Tokens.
    pub tokens: usize,
    /// Experts each chooses.
    pub slots: usize,
    /// Experts there are.
    pub experts: usize,
}

/// Rows that each expert gets; they sum to `tokens * slots`.
pub type Routing = dyn Fn(Choices) -> Vec<usize>;

impl Choices {
    /// As many rows for every expert, the first ones one more where they do not divide.
    pub fn balanced(self) -> Vec<usize> {
        let rows = self.tokens * self.slots;
        let share = |expert| rows * expert / self.experts;
        let all = 0..self.experts;
        all.map(|e| share(e + 1) - share(e)).collect()
    }
}

impl Device {
    /// A meta device that stands for the CPU.
    pub fn meta_cpu() -> Self {
        Self::without_memory(Backend::Cpu(Cpu::new(1, false)))
    }

    /// A meta device that stands for a GPU whose weights and activations are `dtype`: f32 or bf16.
    ///
    /// # Panics
    /// When `dtype` is another.
    pub fn meta_cuda(properties: Properties, dtype: Dtype) -> Self {
        let platform = MetaPlatform { properties };
        Self::without_memory(Backend::Cuda(Cuda::new(Rc::new(platform), dtype)))
    }

    /// Whether this is a meta device.
    pub fn is_meta(&self) -> bool {
        self.0.meta
    }

    /// What the routers of a meta device choose from now on; balanced where nothing was said.
    pub fn assume_routing(&self, routing: Rc<Routing>) {
        self.0.routing.replace(Some(routing));
    }

    /// Rows that each expert gets on a meta device.
    pub(crate) fn assumed_rows(&self, choices: Choices) -> Vec<usize> {
        match &*self.0.routing.borrow() {
            None => choices.balanced(),
            Some(routing) => routing(choices),
        }
    }
}

/// A GPU that takes every request and does nothing.
struct MetaPlatform {
    properties: Properties,
}

impl Platform for MetaPlatform {
    fn properties(&self) -> &Properties {
        &self.properties
    }

    fn divides(&self) -> bool {
        true
    }

    fn runs(&self) -> bool {
        false
    }

    fn allocate(&self, _bytes: u64) -> Result<Address, DeviceError> {
        Ok(NOWHERE)
    }

    fn free(&self, _address: Address, _bytes: u64) {}

    fn upload(&self, _dst: Address, _bytes: &[u8]) -> Result<(), DeviceError> {
        Ok(())
    }

    fn download(&self, _src: Address, bytes: &mut [u8]) -> Result<(), DeviceError> {
        bytes.fill(0);
        Ok(())
    }

    fn copy(&self, _src: Address, _dst: Address, _bytes: u64) -> Result<(), DeviceError> {
        Ok(())
    }

    fn fill(&self, _dst: Address, _byte: u8, _bytes: u64) -> Result<(), DeviceError> {
        Ok(())
    }

    fn forget(&self, _dst: Address, _bytes: u64) {}

    fn load(&self, _program: &Program) -> Result<Module, DeviceError> {
        unreachable!("kernels of meta devices do not run")
    }

    fn launch(&self, _launch: &Launch<'_>) -> Result<(), DeviceError> {
        unreachable!("kernels of meta devices do not run")
    }

    fn encode(&self, _map: &TensorMap) -> Result<EncodedMap, DeviceError> {
        unreachable!("kernels of meta devices do not run")
    }

    /// The vendor's library takes no memory beside its workspace, so neither way is seen.
    fn dense(&self, _product: &Dense) -> Result<bool, DeviceError> {
        Ok(true)
    }

    fn lend(&self, _address: Address, _bytes: u64) -> Result<Lent, DeviceError> {
        unreachable!("ranks of meta devices exchange nothing")
    }

    fn adopt(&self, _lent: &Lent) -> Result<(), DeviceError> {
        unreachable!("ranks of meta devices exchange nothing")
    }

    fn disown(&self, _address: Address) {}

    fn synchronize(&self) -> Result<(), DeviceError> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn law_balanced_choices_sum_and_differ_by_one() {
        for (tokens, slots, experts) in [(0, 2, 4), (7, 3, 8), (64, 8, 128), (5, 1, 3)] {
            let choices = Choices {
                tokens,
                slots,
                experts,
            };
            let rows = choices.balanced();
            assert_eq!(rows.iter().sum::<usize>(), tokens * slots);
            let (least, most) = (rows.iter().min(), rows.iter().max());
            assert!(most.unwrap() - least.unwrap() <= 1, "{rows:?}");
        }
    }
}
