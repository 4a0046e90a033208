//! Products of experts: by counts on the host and by offsets on the device, and where the device has it
//! by the vendor's library.

use std::rc::Rc;

use moefold_profiles::{Dtype, Op, Pass};

use super::{Sizes, case};
use crate::check::{Case, Inputs, Written};
use crate::device::TensorClass;
use crate::grouped_gemm::{self, Rows};
use crate::tensor::Tensor;

/// Rows of each expert: equal but for a remainder, or falling as 1, 1/2, 1/3 with the last empty.
fn counts(rows: usize, experts: usize, skewed: bool) -> Vec<usize> {
    let weight = |e: usize| match skewed {
        true if e + 1 == experts => 0.0,
        true => 1.0 / (e + 1) as f64,
        false => 1.0,
    };
    let total: f64 = (0..experts).map(weight).sum();
    let mut counts: Vec<usize> = (0..experts)
        .map(|e| (rows as f64 * weight(e) / total) as usize)
        .collect();
    counts[0] += rows - counts.iter().sum::<usize>();
    counts
}

/// How rows are dealt to the experts of a device in the cases of grouped products: the name of each way
/// and the rows of each expert.
pub fn loads(sizes: &Sizes) -> [(&'static str, Vec<usize>); 2] {
    let rows = sizes.tokens * sizes.topk;
    [("even", false), ("skewed", true)]
        .map(|(name, skewed)| (name, counts(rows, sizes.experts, skewed)))
}

/// One product of experts: `[rows, k]` by `[experts, n, k]`.
#[derive(Clone)]
struct Layer {
    name: String,
    counts: Rc<Vec<usize>>,
    n: usize,
    k: usize,
    dtype: Dtype,
}

pub(super) fn cases(sizes: &Sizes, dtype: Dtype) -> Vec<Case> {
    let mut all = Vec::new();
    for (load, counts) in loads(sizes) {
        let counts = Rc::new(counts);
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
            all.extend([layer.forward(), layer.dgrad(), layer.wgrad()]);
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

    fn forward(&self) -> Case {
        let layer = self.clone();
        let name = format!("grouped_gemm::forward {}", self.name);
        case(name, self.key(Pass::Forward), move |inputs| {
            let (x, w) = (layer.x(inputs), inputs.tensor(&layer.weights(), 0.02));
            let counts = Rc::clone(&layer.counts);
            Box::new(move || vec![Written::new("y", &grouped_gemm::forward(&x, &w, &counts))])
        })
    }

    fn dgrad(&self) -> Case {
        let layer = self.clone();
        let name = format!("grouped_gemm::dgrad {}", self.name);
        case(name, self.key(Pass::Dgrad), move |inputs| {
            let (dy, w) = (layer.dy(inputs), inputs.tensor(&layer.weights(), 0.02));
            let counts = Rc::clone(&layer.counts);
            Box::new(move || vec![Written::new("dx", &grouped_gemm::dgrad(&dy, &w, &counts))])
        })
    }

    fn wgrad(&self) -> Case {
        let layer = self.clone();
        let name = format!("grouped_gemm::wgrad {}", self.name);
        case(name, self.key(Pass::Wgrad), move |inputs| {
            let (dy, x) = (layer.dy(inputs), layer.x(inputs));
            let dw = inputs.statistic(&layer.weights(), 1.0);
            let counts = Rc::clone(&layer.counts);
            Box::new(move || {
                grouped_gemm::wgrad(&dy, &x, &counts, &dw);
                vec![Written::new("dw", &dw)]
            })
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
