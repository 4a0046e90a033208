//! The emulator runs what is right and reports what is wrong.

use super::Emulator;
use super::fault::Fault;
use crate::cuda::platform::{Address, Launch, Platform};
use crate::cuda::program::{Architecture, Arg, Define, Grid, Source};

/// A device; none where there is no C++ compiler, of which `testing::emulated` speaks.
fn emulator(seed: u64) -> Option<Emulator> {
    Emulator::new(Architecture::SM90, seed).ok()
}

/// Runs a kernel and gives its fault.
fn run(
    emulator: &Emulator,
    source: Source,
    defines: &[Define],
    entry: &'static str,
    grid: Grid,
    args: &[Arg],
) -> Result<(), Fault> {
    let module = emulator.load(&source.with(defines)).expect("it compiles");
    let launch = Launch {
        op: "test",
        module,
        entry,
        grid,
        args,
    };
    emulator.run(&launch).expect("the launch is well formed")
}

fn words(emulator: &Emulator, address: Address, count: usize) -> Vec<u32> {
    let mut bytes = vec![0; 4 * count];
    emulator.download(address, &mut bytes).expect("inside");
    bytes
        .chunks_exact(4)
        .map(|word| u32::from_le_bytes([word[0], word[1], word[2], word[3]]))
        .collect()
}

#[test]
fn a_block_sums_its_threads() {
    const SOURCE: Source = Source {
        stem: "sum",
        text: "#include \"prelude.cuh\"
KERNEL(256, 1) sum(const float* x, float* y, i32 n) {
  DYN_SMEM(shared);
  float total = 0.f;
  for (i32 i = threadIdx.x; i < n; i += blockDim.x) total += x[blockIdx.x * n + i];
  total = block_sum(total, (float*)shared);
  if (threadIdx.x == 0) y[blockIdx.x] = total;
}
EXPORT(sum)
",
    };
    for seed in 0..10 {
        let Some(emulator) = emulator(seed) else {
            return;
        };
        let (rows, n) = (4, 1000);
        let x: Vec<f32> = (0..rows * n).map(|i| (i % 17) as f32).collect();
        let input = emulator.allocate(4 * x.len() as u64).expect("memory");
        emulator
            .upload(input, bytemuck::cast_slice(&x))
            .expect("inside");
        let output = emulator.allocate(4 * rows as u64).expect("memory");
        let args = [
            Arg::Address(input),
            Arg::Address(output),
            Arg::I32(n as i32),
        ];
        let grid = Grid::linear(rows, 256, 32);
        run(&emulator, SOURCE, &[], "sum", grid, &args).expect("it is right");
        for (row, word) in words(&emulator, output, rows).into_iter().enumerate() {
            let want: f32 = x[row * n..][..n].iter().sum();
            assert_eq!(f32::from_bits(word), want, "row {row}");
        }
    }
}
