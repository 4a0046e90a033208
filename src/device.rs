//! Which device a command runs on: what `--device` means on this machine, and what of a plan the
//! devices at hand have no room for, said before anything is allocated on them.

use anyhow::anyhow;
use moefold_executor::device::DeviceSpec;
use moefold_executor::support;
use moefold_kernels::cuda::survey::{Survey, Surveyed};
use moefold_planner::plan::Plan;
use moefold_profiles::units::Bytes;
use moefold_profiles::{Dtype, Precision, presets};

use anew::Anew;

use crate::cli::{Device, Launch};
use crate::doctor;
use crate::failure::Failure;
use crate::output::Output;

mod anew;
mod fit;
mod host;

pub(crate) use host::Copies;

/// What `--device` came to.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Chosen {
    /// The CPU.
    Cpu,
    /// GPUs, at least one, in the driver's order.
    Cuda(Vec<Gpu>),
}

/// A GPU that kernels run on.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Gpu {
    pub(crate) ordinal: u32,
    /// The vendor's name of it.
    pub(crate) name: String,
    /// Memory in all, and what others have taken of it; where the driver says.
    pub(crate) memory: Option<Bytes>,
    pub(crate) used: Option<Bytes>,
}

/// Gives `--device` its meaning here: `auto` is the GPUs where `moefold doctor` finds them usable,
/// else the CPU. Says on stderr what was picked, where one might have expected another.
pub(crate) fn choose(asked: Device, output: Output) -> Result<Chosen, Failure> {
    if asked == Device::Cpu {
        return Ok(Chosen::Cpu);
    }
    let survey = Survey::take();
    match doctor::usable(&survey) {
        Ok(()) => {
            let gpus: Vec<Gpu> = survey.devices.iter().map(Gpu::of).collect();
            if asked == Device::Auto {
                let gpu = &gpus[0];
                output.note(&format!("device cuda: GPU {} ({})", gpu.ordinal, gpu.name))?;
            }
            Ok(Chosen::Cuda(gpus))
        }
        Err(missing) if asked == Device::Cuda => Err(Failure::Request(anyhow!(
            "--device cuda: {}: {}; {}",
            missing.what,
            missing.found,
            missing.remedy
        ))),
        Err(missing) => {
            // A machine without NVIDIA's driver has nobody who expects a GPU of it.
            if survey.driver.is_ok() || !missing.is_absent() {
                output.note(&format!(
                    "device cpu, since of {} this was found: {} ({})",
                    missing.what, missing.found, missing.remedy
                ))?;
            }
            Ok(Chosen::Cpu)
        }
    }
}

impl Gpu {
    fn of(device: &Surveyed) -> Self {
        Self {
            ordinal: device.ordinal,
            name: device.name.clone(),
            memory: device.memory,
            used: device.memory_used,
        }
    }

    /// Memory that nobody has taken; all of it where nobody says what is taken.
    fn free(&self) -> Option<Bytes> {
        let used = self.used.unwrap_or(Bytes::ZERO);
        Some(Bytes(self.memory?.0.saturating_sub(used.0)))
    }
}

impl Chosen {
    /// The device of a plan's ranks: what weights and activations are stored in follows from its
    /// precision, and what each reserves from what the planner says of its tensors. Refuses what
    /// the devices have no room for, or are too few for, and what the host has no room for, with the `copies` of a
    /// run.
    pub(crate) fn of_plan(
        &self,
        plan: &Plan,
        launch: Launch,
        threads_per_rank: Option<usize>,
        copies: Copies,
    ) -> Result<DeviceSpec, Failure> {
        let spec = self.spec(plan.planned.precision.activation(), threads_per_rank);
        support::check(&plan.planned, &plan.model, &spec).map_err(|refused| {
            let hint = match (self, plan.planned.precision) {
                (Self::Cpu, Precision::Bf16) => {
                    "; `moefold doctor` says what a GPU of this machine would need"
                }
                _ => "",
            };
            Failure::Request(anyhow!("{refused}{hint}"))
        })?;
        if let (Self::Cuda(gpus), DeviceSpec::Cuda { dtype, .. }) = (self, spec) {
            let (reserve, predicted) = fit::check(plan, gpus, launch)?;
            host::check(plan, &predicted, launch, false, copies)?;
            let reserve = Some(reserve);
            return Ok(DeviceSpec::Cuda { dtype, reserve });
        }
        let of_cpu = || presets::local(plan.request.gpus).gpu;
        let anew = Anew::new(plan, (!plan.cluster.gpu.is_cpu()).then(of_cpu));
        host::check(plan, &anew.planned.predicted, launch, true, copies)?;
        Ok(spec)
    }

    /// The same without a plan, for weights and activations in `dtype`.
    pub(crate) fn spec(&self, dtype: Dtype, threads_per_rank: Option<usize>) -> DeviceSpec {
        match self {
            Self::Cpu => DeviceSpec::Cpu { threads_per_rank },
            Self::Cuda(_) => DeviceSpec::Cuda {
                dtype,
                reserve: None,
            },
        }
    }
}
