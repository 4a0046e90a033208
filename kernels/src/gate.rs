//! Rows behind a sigmoid gate: `y += sigmoid(l) x`, a logit `l` a row (the shared expert of
//! Qwen1.5-MoE and Qwen2-MoE, arXiv 2407.10671).
//!
//! Backward, with `s = sigmoid(l)`: `dx = s dy`, `dl = s (1 - s) sum over the row of dy x`. Logits are
//! f32 whatever the rows are.
//!
//! A device implementation: one pass over each row, arithmetic in f32. The floor: three rows moved,
//! forward x and y in and y out, backward x and dy in and dx out.

use moefold_profiles::{Dtype, Op, SweepKind};

use crate::buffer::with;
use crate::device::{Backend, TensorClass};
use crate::elementwise::sweep;
use crate::tensor::{Tensor, expect_dims};

pub(crate) use cuda::programs;

/// The cost-table key of a gate on `x`, forward and backward.
pub fn key(x: &Tensor) -> Op {
    sweep(SweepKind::Gate, x)
}

/// `y [N, w] += sigmoid(logits [N, 1]) * x [N, w]`.
///
/// # Panics
/// When the shapes do not agree.
pub fn add(x: &Tensor, logits: &Tensor, y: &Tensor) {
    const OP: &str = "gate::add";
    let _op = x.device().begin(|| key(x));
    let &[rows, width] = x.dims() else {
        panic!("{OP}: x is {x:?}, expected [rows, width]")
    };
    expect_dims(OP, "logits", logits, &[rows, 1]);
    expect_dims(OP, "y", y, x.dims());
    match &x.device().0.backend {
        Backend::Cpu(cpu) => with(OP, [x, logits], [y], |[x, logits], [y]| {
            cpu::add(cpu, x.f32(), logits.f32(), y.f32(), width);
        }),
        Backend::Cuda(gpu) => cuda::add(gpu, x, logits, y),
    }
}

/// `dy [N, w]`, `x [N, w]`, `logits [N, 1]` to `(dx [N, w], dlogits [N, 1] f32)`.
///
/// # Panics
/// When the shapes do not agree.
pub fn backward(dy: &Tensor, x: &Tensor, logits: &Tensor) -> (Tensor, Tensor) {
    const OP: &str = "gate::backward";
    let _op = x.device().begin(|| key(x));
    let &[rows, width] = x.dims() else {
        panic!("{OP}: x is {x:?}, expected [rows, width]")
    };
    expect_dims(OP, "logits", logits, &[rows, 1]);
    expect_dims(OP, "dy", dy, x.dims());
    let device = x.device();
    let dx = device.empty(TensorClass::Activations, x.dtype(), x.dims());
    let dlogits = device.empty(TensorClass::Activations, Dtype::F32, &[rows, 1]);
    match &device.0.backend {
        Backend::Cpu(cpu) => {
            let outputs = [&dx, &dlogits];
            with(OP, [dy, x, logits], outputs, |inputs, [dx, dlogits]| {
                let inputs = inputs.map(crate::buffer::Input::f32);
                cpu::backward(cpu, inputs, dx.f32(), dlogits.f32(), width);
            });
        }
        Backend::Cuda(gpu) => cuda::backward(gpu, [dy, x, logits], &dx, &dlogits),
    }
    (dx, dlogits)
}

mod cpu {
    use crate::parallel::Cpu;
    use crate::simd::{sigmoid, sum2, vectorized};

    pub(super) fn add(cpu: &Cpu, x: &[f32], logits: &[f32], y: &mut [f32], width: usize) {
        cpu.rows(logits.len(), 3 * x.len(), [(y, width)], |rows, [y]| {
            let x = &x[rows.start * width..rows.end * width];
            add_rows(x, &logits[rows], y, width);
        });
    }

    vectorized! {
        fn add_rows(x: &[f32], logits: &[f32], y: &mut [f32], width: usize) {
            for (row, &logit) in logits.iter().enumerate() {
                let open = sigmoid(logit);
                let (x, y) = (&x[row * width..][..width], &mut y[row * width..][..width]);
                for i in 0..width {
                    y[i] += open * x[i];
                }
            }
        }
    }

    pub(super) fn backward(
        cpu: &Cpu,
        [dy, x, logits]: [&[f32]; 3],
        dx: &mut [f32],
        dlogits: &mut [f32],
        width: usize,
    ) {
        let outputs = [(dx, width), (dlogits, 1)];
        cpu.rows(logits.len(), 3 * x.len(), outputs, |rows, [dx, dlogits]| {
            let range = rows.start * width..rows.end * width;
            backward_rows(&dy[range.clone()], &x[range], &logits[rows], dx, dlogits);
        });
    }

    vectorized! {
        fn backward_rows(
            dy: &[f32],
            x: &[f32],
            logits: &[f32],
            dx: &mut [f32],
            dlogits: &mut [f32],
        ) {
            let width = dx.len() / logits.len().max(1);
            for (row, &logit) in logits.iter().enumerate() {
                let open = sigmoid(logit);
                let (dy, x) = (&dy[row * width..][..width], &x[row * width..][..width]);
                let dx = &mut dx[row * width..][..width];
                for i in 0..width {
                    dx[i] = open * dy[i];
                }
                dlogits[row] = open * (1.0 - open) * sum2(dy, x, |dy, x| dy * x);
            }
        }
    }
}

mod cuda {
    //! The launches.

    use moefold_profiles::Dtype;

    use crate::buffer::disjoint;
    use crate::cuda::Cuda;
    use crate::cuda::operand::vector;
    use crate::cuda::program::{Arg, Define, Entry, Grid, Listed, Needs, Program, Source, source};
    use crate::tensor::Tensor;

    const SOURCE: Source = source!("gate");
    const THREADS: u32 = 256;
    /// A warp has a row.
    const ROWS_PER_BLOCK: usize = THREADS as usize / 32;

    fn program(dtype: Dtype, vector: usize) -> Program {
        SOURCE.with(&[Define::dtype("T", dtype), Define::int("VEC", vector)])
    }

    /// Every specialization.
    pub(crate) fn programs() -> Vec<Listed> {
        let list = |(dtype, vector, needs)| Listed {
            program: program(dtype, vector),
            needs,
            entries: vec![
                Entry::plain("gate_add", 48, 0),
                Entry::plain("gate_backward", 64, 0),
            ],
        };
        let all = [
            (Dtype::Bf16, 8, Needs::Sm80),
            (Dtype::F32, 4, Needs::Sm80),
            (Dtype::Bf16, 1, Needs::Odd),
            (Dtype::F32, 1, Needs::Odd),
        ];
        all.map(list).to_vec()
    }

    /// The program for these tensors, with its grid, rows and accesses of a row.
    fn dealt(op: &'static str, tensors: &[&Tensor], logits: &Tensor) -> (Program, Grid, [Arg; 2]) {
        let x = tensors[0];
        for tensor in tensors {
            tensor.expect_dtype(op, x.dtype());
        }
        logits.expect_dtype(op, Dtype::F32);
        let (rows, vector) = (x.num_rows(), vector(tensors));
        let grid = Grid::linear(rows.div_ceil(ROWS_PER_BLOCK), THREADS, 0);
        let sizes = [Arg::size(rows), Arg::size(x.width() / vector)];
        (program(x.dtype(), vector), grid, sizes)
    }

    pub(super) fn add(gpu: &Cuda, x: &Tensor, logits: &Tensor, y: &Tensor) {
        const OP: &str = "gate::add";
        disjoint(OP, &[x, logits], &[y]);
        let (program, grid, sizes) = dealt(OP, &[x, y], logits);
        let arguments = [&[x.into(), logits.into(), y.into()][..], &sizes].concat();
        gpu.launch(OP, &program, "gate_add", grid, &arguments);
    }

    pub(super) fn backward(
        gpu: &Cuda,
        [dy, x, logits]: [&Tensor; 3],
        dx: &Tensor,
        dlogits: &Tensor,
    ) {
        const OP: &str = "gate::backward";
        disjoint(OP, &[dy, x, logits], &[dx, dlogits]);
        let (program, grid, sizes) = dealt(OP, &[dy, x, dx], logits);
        let tensors = [dy, x, logits, dx, dlogits].map(Arg::from);
        let arguments = [&tensors[..], &sizes].concat();
        gpu.launch(OP, &program, "gate_backward", grid, &arguments);
    }
}
