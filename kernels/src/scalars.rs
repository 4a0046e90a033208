//! [`Scalars`]: a few numbers of a step (losses, the gradient's norm) that the device sums up and reads
//! itself, so that the host need not wait for them; and [`Factor`], the gradients' scale made of one.
//!
//! On the CPU they are f64 of the host, and give what [`elementwise::sum`] and
//! [`grad_norm::sum_squares`] give. On CUDA they are f32 in device memory: each addition is of a sum
//! made in f64 over all elements, in a fixed order, and rounds the number once, to a relative 6e-8.
//!
//! A device implementation: partial sums of fixed blocks, and one block that adds those in order to
//! the number; the clip rule is one thread's work. Floors are those of reading the tensors once.

use std::cell::RefCell;
use std::rc::Rc;

use moefold_profiles::{Dtype, SweepKind};

use crate::buffer::with;
use crate::device::{Backend, Device, TensorClass};
use crate::elementwise;
use crate::grad_norm;
use crate::tensor::Tensor;
use crate::total::Of;

pub(crate) use cuda::programs;

/// Added to a norm before a limit is divided by it, as PyTorch's `clip_grad_norm_` does.
const CLIP_EPS: f64 = 1e-6;

/// Numbers that the device keeps. Clones are the same numbers.
#[derive(Clone, Debug)]
pub struct Scalars(Values);

#[derive(Clone, Debug)]
enum Values {
    Host(Rc<RefCell<Vec<f64>>>),
    /// `[len]` f32.
    Device(Tensor),
}

impl Scalars {
    /// `len` zeros; where they take device memory, it counts as `class`.
    pub fn zeros(device: &Device, class: TensorClass, len: usize) -> Self {
        Self(match &device.0.backend {
            Backend::Cpu(_) => Values::Host(Rc::new(RefCell::new(vec![0.0; len]))),
            Backend::Cuda(_) => Values::Device(device.zeros(class, Dtype::F32, &[len])),
        })
    }

    /// How many there are.
    pub fn len(&self) -> usize {
        match &self.0 {
            Values::Host(values) => values.borrow().len(),
            Values::Device(values) => values.len(),
        }
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Sets all to zero.
    pub fn clear(&self) {
        match &self.0 {
            Values::Host(values) => values.borrow_mut().fill(0.0),
            Values::Device(values) => values.fill_zero(),
        }
    }

    /// Number `i` grows by `factor` times the sum of all elements of `x`.
    pub fn add_sum(&self, i: usize, factor: f64, x: &Tensor) {
        let _op = x.device().begin(|| elementwise::sweep(SweepKind::Sum, x));
        match &self.0 {
            Values::Host(values) => values.borrow_mut()[i] += factor * elementwise::sum(x),
            Values::Device(values) => cuda::add(&values.view(i, &[1]), factor, x, Of::Values),
        }
    }

    /// Number `i` grows by `factor` times the sum of the squares of all elements of `x`.
    pub fn add_squares(&self, i: usize, factor: f64, x: &Tensor) {
        let _op = x.device().begin(|| grad_norm::key(x));
        match &self.0 {
            Values::Host(values) => values.borrow_mut()[i] += factor * grad_norm::sum_squares(x),
            Values::Device(values) => cuda::add(&values.view(i, &[1]), factor, x, Of::Squares),
        }
    }

    /// Number `i` grows by `factor` times the inner product of `x` and `y`.
    ///
    /// # Panics
    /// When their lengths or dtypes differ.
    pub fn add_products(&self, i: usize, factor: f64, x: &Tensor, y: &Tensor) {
        let _op = x.device().begin(|| elementwise::sweep(SweepKind::Sum, x));
        assert!(
            x.len() == y.len() && x.dtype() == y.dtype(),
            "scalars::add_products: {x:?} with {y:?}, expected as many of one dtype"
        );
        match &self.0 {
            Values::Host(values) => {
                let product: f64 = with("scalars::add_products", [x, y], [], |[x, y], []| {
                    let pairs = x.f32().iter().zip(y.f32());
                    pairs.map(|(&x, &y)| f64::from(x) * f64::from(y)).sum()
                });
                values.borrow_mut()[i] += factor * product;
            }
            Values::Device(values) => {
                cuda::add(&values.view(i, &[1]), factor, x, Of::Products(y));
            }
        }
    }

    /// The numbers in device memory, `[len]` f32, as collectives take them; none where they are the
    /// host's.
    pub fn tensor(&self) -> Option<&Tensor> {
        match &self.0 {
            Values::Host(_) => None,
            Values::Device(values) => Some(values),
        }
    }

    /// The numbers. The host waits for the device.
    pub fn read(&self) -> Vec<f64> {
        match &self.0 {
            Values::Host(values) => values.borrow().clone(),
            Values::Device(values) => values.to_f32().into_iter().map(f64::from).collect(),
        }
    }

    /// Overwrites all.
    ///
    /// # Panics
    /// When there are not as many.
    pub fn write(&self, new: &[f64]) {
        assert!(
            new.len() == self.len(),
            "scalars::write: {} numbers for {}",
            new.len(),
            self.len()
        );
        match &self.0 {
            Values::Host(values) => values.borrow_mut().copy_from_slice(new),
            Values::Device(values) => {
                let narrow: Vec<f32> = new.iter().map(|&value| value as f32).collect();
                values.copy_from_f32(&narrow);
            }
        }
    }
}

/// A factor on gradients, which may be known to the device alone.
#[derive(Clone, Debug)]
pub struct Factor(pub(crate) Known);

#[derive(Clone, Debug)]
pub(crate) enum Known {
    Host(f32),
    /// `[1]` f32.
    Device(Tensor),
}

impl Factor {
    /// A number.
    pub fn of(value: f32) -> Self {
        Self(Known::Host(value))
    }

    /// `scale * min(1, limit / (norm + 1e-6))` where number `i` of `squares` is the square of the
    /// norm; without a limit, `scale`. Computed where the number is.
    pub fn clipped(squares: &Scalars, i: usize, scale: f64, limit: Option<f64>) -> Self {
        let Some(limit) = limit else {
            return Self::of(scale as f32);
        };
        match &squares.0 {
            Values::Host(values) => {
                let norm = values.borrow()[i].sqrt();
                Self::of((scale * (limit / (norm + CLIP_EPS)).min(1.0)) as f32)
            }
            Values::Device(values) => {
                let square = values.view(i, &[1]);
                let key = || elementwise::sweep(SweepKind::Clip, &square);
                let _op = square.device().begin(key);
                Self(Known::Device(cuda::clip(&square, scale, limit)))
            }
        }
    }
}

mod cuda {
    //! The launches.

    use moefold_profiles::Dtype;

    use crate::buffer::disjoint;
    use crate::cuda::Cuda;
    use crate::cuda::program::{Arg, Entry, Grid, Listed, Needs, Source, source};
    use crate::device::{Backend, TensorClass};
    use crate::tensor::Tensor;
    use crate::total::{Of, partial};

    const SOURCE: Source = source!("scalars");

    /// Threads of the block that sums the blocks (`THREADS` in the source).
    const THREADS: u32 = 256;

    fn gpu(tensor: &Tensor) -> &Cuda {
        match &tensor.device().0.backend {
            Backend::Cuda(gpu) => gpu,
            Backend::Cpu(_) => panic!("scalars: {tensor:?} is the host's, expected the device's"),
        }
    }

    /// Two floats whose sum a number is, to 48 bits.
    fn halves(value: f64) -> [Arg; 2] {
        let high = value as f32;
        let low = (value - f64::from(high)) as f32;
        [high, if low.is_finite() { low } else { 0.0 }].map(Arg::F32)
    }

    /// `number += factor * total(x)`.
    pub(super) fn add(number: &Tensor, factor: f64, x: &Tensor, of: Of<'_>) {
        const OP: &str = "scalars::add";
        disjoint(OP, &[x], &[number]);
        let gpu = gpu(number);
        let Some(partial) = partial(gpu, OP, x, of) else {
            return;
        };
        let [high, low] = halves(factor);
        gpu.launch(
            OP,
            &SOURCE.with(&[]),
            "scalars_add",
            Grid::linear(1, THREADS, 8 * THREADS as usize),
            &[
                (&partial).into(),
                Arg::size(partial.num_rows()),
                number.into(),
                high,
                low,
            ],
        );
    }

    /// The clip rule.
    pub(super) fn clip(square: &Tensor, scale: f64, limit: f64) -> Tensor {
        let device = square.device();
        let factor = device.empty(TensorClass::Transient, Dtype::F32, &[1]);
        let ([scale, scale_low], [limit, limit_low]) = (halves(scale), halves(limit));
        gpu(square).launch(
            "scalars::clip",
            &SOURCE.with(&[]),
            "scalars_clip",
            Grid::linear(1, 32, 0),
            &[
                square.into(),
                scale,
                scale_low,
                limit,
                limit_low,
                (&factor).into(),
            ],
        );
        factor
    }

    /// What is launched, with its limits.
    pub(crate) fn programs() -> Vec<Listed> {
        let entry = |name, shared| Entry {
            name,
            registers: 48,
            shared,
            shows: &[],
        };
        vec![Listed {
            program: SOURCE.with(&[]),
            needs: Needs::Sm80,
            entries: vec![entry("scalars_add", 8 * THREADS), entry("scalars_clip", 0)],
        }]
    }
}

#[cfg(test)]
mod tests;
