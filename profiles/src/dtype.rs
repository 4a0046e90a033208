//! Element types of tensors, and the precisions a training run computes in.

use std::fmt;

crate::named! {
    /// The type of one tensor element.
    pub enum Dtype {
        /// IEEE binary32.
        F32 = "f32",
        /// bfloat16.
        Bf16 = "bf16",
        /// 8-bit float (E4M3 or E5M2, by recipe).
        Fp8 = "fp8",
        /// 4-bit float (E2M1).
        Fp4 = "fp4",
        /// 32-bit signed integer, the type of token ids and row maps.
        I32 = "i32",
    }
}

impl Dtype {
    /// Width of an element in bits; Fp4 is the one that is not whole bytes.
    pub fn bits(self) -> u64 {
        match self {
            Self::F32 | Self::I32 => 32,
            Self::Bf16 => 16,
            Self::Fp8 => 8,
            Self::Fp4 => 4,
        }
    }

    /// Bytes of `count` elements, rounded up; saturates beyond any memory.
    pub fn bytes(self, count: u64) -> crate::units::Bytes {
        crate::units::Bytes(count.saturating_mul(self.bits()).div_ceil(8))
    }
}

impl fmt::Display for Dtype {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

crate::named! {
    /// The recipe a run computes in: which dtype its matrix products read.
    #[derive(Default)]
    pub enum Precision {
        /// f32 throughout; what the CPU executor runs.
        Fp32 = "fp32",
        /// bf16 weights and activations, f32 main gradients and master weights.
        #[default]
        Bf16 = "bf16",
        /// FP8 with one scale a tensor, taken from that tensor (Megatron-LM's recipe `tensorwise`).
        Fp8 = "fp8",
        /// FP8 with one scale a tensor, guessed from the maxima of earlier steps (recipe `delayed`).
        Fp8Delayed = "fp8-delayed",
        /// FP8 with 1x128 activation and 128x128 weight scales.
        Fp8Blockwise = "fp8-blockwise",
        /// MXFP8: 1x32 blocks with E8M0 scales.
        Mxfp8 = "mxfp8",
        /// NVFP4: E2M1 in 16-element blocks.
        Nvfp4 = "nvfp4",
    }
}

impl Precision {
    /// The dtype that linear layers multiply in.
    pub fn compute(self) -> Dtype {
        match self {
            Self::Fp32 => Dtype::F32,
            Self::Bf16 => Dtype::Bf16,
            Self::Fp8 | Self::Fp8Delayed | Self::Fp8Blockwise | Self::Mxfp8 => Dtype::Fp8,
            Self::Nvfp4 => Dtype::Fp4,
        }
    }

    /// The dtype activations travel and rest in between linear layers.
    pub fn activation(self) -> Dtype {
        match self {
            Self::Fp32 => Dtype::F32,
            _ => Dtype::Bf16,
        }
    }
}

impl fmt::Display for Precision {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}
