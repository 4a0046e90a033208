//! Products of experts: by counts on the host and by offsets on the device, and where the device has it
//! by the vendor's library.

use std::rc::Rc;

use moefold_profiles::{Dtype, Op, Pass};

use super::{Sizes, called, case};
use crate::cases::{Load, Source as _, grouped};
use crate::check::{Case, Inputs, Written};
use crate::device::TensorClass;
use crate::grouped_gemm::{self, Rows};
use crate::tensor::Tensor;

/// Rows of each expert: equal, the first with the remainder.
fn equal(rows: usize, experts: usize) -> Vec<usize> {
    let mut counts = vec![rows / experts; experts];
    counts[0] += rows % experts;
    counts
}

/// How rows are dealt to the experts of a device in the cases of grouped products: the name of each way
/// and the rows of each expert.
pub fn loads(sizes: &Sizes) -> [(&'static str, Vec<usize>); 2] {
    let rows = sizes.tokens * sizes.topk;
    [
        ("even", equal(rows, sizes.experts)),
        ("skewed", Load::Skewed.counts(rows, sizes.experts)),
    ]
}

/// One product of experts: `[rows, k]` by `[experts, n, k]`.
#[derive(Clone)]
struct Layer {
    name: String,
    counts: Rc<[usize]>,
    n: usize,
    k: usize,
    dtype: Dtype,
}

pub(super) fn cases(sizes: &Sizes, dtype: Dtype) -> Vec<Case> {
    let mut all = Vec::new();
    for (load, counts) in loads(sizes) {
        let counts: Rc<[usize]> = counts.into();
        for (name, n, k) in [
            ("fc1", 2 * sizes.width, sizes.hidden),
            ("fc2", sizes.hidden, sizes.width),
        ] {
            let layer = Layer {
                name: format!("{name} {load}"),
                counts: Rc::clone(&counts),
                n,
                k,
                dtype,
            };
            all.extend([
                layer.by_counts("forward", Pass::Forward),
                layer.by_counts("dgrad", Pass::Dgrad),
                layer.by_counts("wgrad", Pass::Wgrad),
            ]);
            all.extend([layer.forward_of(), layer.dgrad_of()]);
            all.push(layer.wgrad_of(Gradient::F32));
            all.push(layer.wgrad_of(Gradient::AsStored));
            let suits = dtype == Dtype::Bf16 && n % 8 == 0 && k % 8 == 0;
            let by_library = [
                layer.forward_of(),
                layer.dgrad_of(),
                layer.wgrad_of(Gradient::F32),
            ];
            all.extend(by_library.into_iter().filter(|_| suits).map(|case| Case {
                name: format!("{}, by cuBLASLt", case.name),
                by_library: true,
                ..case
            }));
        }
    }
    all
}

/// What main gradients are stored in.
#[derive(Clone, Copy)]
enum Gradient {
    F32,
    /// The dtype of the weights.
    AsStored,
}

impl Layer {
    fn key(&self, pass: Pass) -> Op {
        Op::GroupedGemm {
            groups: self.counts.len() as u64,
            rows: self.rows() as u64,
            n: self.n as u64,
            k: self.k as u64,
            pass,
            dtype: self.dtype,
        }
    }

    fn rows(&self) -> usize {
        self.counts.iter().sum()
    }

    fn x(&self, inputs: &mut Inputs<'_>) -> Tensor {
        inputs.tensor(&[self.rows(), self.k], 1.0)
    }

    fn dy(&self, inputs: &mut Inputs<'_>) -> Tensor {
        inputs.tensor(&[self.rows(), self.n], 1.0)
    }

    fn weights(&self) -> [usize; 3] {
        [self.counts.len(), self.n, self.k]
    }

    /// The counts as the device has them.
    fn offsets(&self, inputs: &Inputs<'_>) -> Tensor {
        let mut offsets = vec![0];
        for (expert, count) in self.counts.iter().enumerate() {
            offsets.push(offsets[expert] + *count as i32);
        }
        let dims = [offsets.len()];
        inputs
            .device
            .from_i32(TensorClass::Activations, &offsets, &dims)
    }

    /// The product by counts on the host.
    fn by_counts(&self, function: &str, pass: Pass) -> Case {
        let layer = self.clone();
        let name = format!("grouped_gemm::{function} {}", self.name);
        called(name, self.key(pass), move |inputs| {
            let counts = Rc::clone(&layer.counts);
            grouped(inputs, counts, [layer.n, layer.k], pass)
        })
    }

    fn forward_of(&self) -> Case {
        let layer = self.clone();
        let name = format!("grouped_gemm::forward_of {}", self.name);
        case(name, self.key(Pass::Forward), move |inputs| {
            let (x, w) = (layer.x(inputs), inputs.tensor(&layer.weights(), 0.02));
            let offsets = layer.offsets(inputs);
            Box::new(move || {
                let y = grouped_gemm::forward_of(&x, &w, Rows::Offsets(&offsets));
                vec![Written::new("y", &y)]
            })
        })
    }

    fn dgrad_of(&self) -> Case {
        let layer = self.clone();
        let name = format!("grouped_gemm::dgrad_of {}", self.name);
        case(name, self.key(Pass::Dgrad), move |inputs| {
            let (dy, w) = (layer.dy(inputs), inputs.tensor(&layer.weights(), 0.02));
            let offsets = layer.offsets(inputs);
            Box::new(move || {
                let dx = grouped_gemm::dgrad_of(&dy, &w, Rows::Offsets(&offsets));
                vec![Written::new("dx", &dx)]
            })
        })
    }

    fn wgrad_of(&self, gradient: Gradient) -> Case {
        let layer = self.clone();
        let what = match gradient {
            Gradient::F32 => "",
            Gradient::AsStored => ", gradients as stored",
        };
        let name = format!("grouped_gemm::wgrad_of {}{what}", self.name);
        case(name, self.key(Pass::Wgrad), move |inputs| {
            let (dy, x) = (layer.dy(inputs), layer.x(inputs));
            let dw = match gradient {
                Gradient::F32 => inputs.statistic(&layer.weights(), 1.0),
                Gradient::AsStored => inputs.tensor(&layer.weights(), 1.0),
            };
            let offsets = layer.offsets(inputs);
            Box::new(move || {
                grouped_gemm::wgrad_of(&dy, &x, Rows::Offsets(&offsets), &dw);
                vec![Written::new("dw", &dw)]
            })
        })
    }
}
