//! The emulator runs what is right, under many schedules, and reports what is wrong by the right
//! detector, under every one of them.

use moefold_kernels::cuda::platform::{Address, Launch, Platform};
use moefold_kernels::cuda::program::{Architecture, Arg, Define, Grid, Source, Swizzle, TensorMap};
use moefold_kernels::{Dtype, bf16};

use super::Emulator;
use super::fault::{Fault, Kind};
use crate::at_hand;

const SEEDS: u64 = 12;

fn source(stem: &'static str, text: &'static str) -> Source {
    Source { stem, text }
}

fn emulator(seed: u64) -> Option<Emulator> {
    at_hand(Emulator::new(Architecture::SM90, seed))
}

/// Runs a kernel with an error planted, and gives what was found.
fn run(
    emulator: &Emulator,
    source: Source,
    planted: usize,
    entry: &'static str,
    grid: Grid,
    args: &[Arg],
) -> Result<(), Fault> {
    let program = source.with(&[Define::int("FAULT", planted)]);
    let module = emulator.load(&program).expect("it compiles");
    let launch = Launch {
        module,
        entry,
        grid,
        args,
    };
    emulator.run(&launch).expect("the launch is well formed")
}

fn input<A: bytemuck::NoUninit>(emulator: &Emulator, values: &[A]) -> Address {
    let bytes: &[u8] = bytemuck::cast_slice(values);
    let address = emulator.allocate(bytes.len() as u64).expect("memory");
    emulator.upload(address, bytes).expect("inside");
    address
}

fn output<A: bytemuck::AnyBitPattern>(
    emulator: &Emulator,
    address: Address,
    count: usize,
) -> Vec<A> {
    let mut bytes = vec![0; size_of::<A>() * count];
    emulator.download(address, &mut bytes).expect("inside");
    bytes
        .chunks_exact(size_of::<A>())
        .map(bytemuck::pod_read_unaligned)
        .collect()
}

/// `case` runs with an error planted and checks the results of a run without fault. Error 0 is
/// none; each of the others is found under every schedule, by one of the detectors named.
fn check(planted: &[(usize, &[Kind])], case: impl Fn(&Emulator, usize) -> Result<(), Fault>) {
    for seed in 0..SEEDS {
        let Some(emulator) = emulator(seed) else {
            return;
        };
        if let Err(fault) = case(&emulator, 0) {
            panic!("nothing is wrong, seed {seed}: {fault}");
        }
        for &(number, kinds) in planted {
            // Memory and launches of its own, so that nothing of a run before helps.
            let Some(emulator) = self::emulator(seed) else {
                return;
            };
            match case(&emulator, number) {
                Ok(()) => panic!("planted error {number} was not found, seed {seed}"),
                Err(fault) => assert!(
                    kinds.contains(&fault.kind),
                    "planted error {number}, seed {seed}: expected {kinds:?}, got {fault}"
                ),
            }
        }
    }
}

#[test]
fn plain_shared_memory() {
    use Kind::{Barrier, Deadlock, Divergence, Misaligned, OutOfBounds, Race, Uninitialized};
    let x: Vec<f32> = (0..128).map(|i| i as f32).collect();
    let planted: [(usize, &[Kind]); 10] = [
        (1, &[Race]),
        (2, &[OutOfBounds]),
        (3, &[Uninitialized]),
        (4, &[OutOfBounds]),
        (5, &[Barrier, Deadlock]),
        (6, &[Deadlock]),
        (7, &[Divergence]),
        (8, &[Misaligned]),
        (9, &[Race]),
        (10, &[OutOfBounds]),
    ];
    check(&planted, |emulator, number| {
        let (from, to) = (input(emulator, &x), emulator.allocate(512).expect("memory"));
        let args = [Arg::Address(from), Arg::Address(to), Arg::I32(128)];
        let grid = Grid::linear(1, 128, 512);
        run(
            emulator,
            source("block", include_str!("tests/block.cu")),
            number,
            "turn",
            grid,
            &args,
        )?;
        let got: Vec<f32> = output(emulator, to, 128);
        assert!(
            got.iter()
                .zip(x.iter().rev())
                .all(|(got, want)| got == want)
        );
        Ok(())
    });
}

#[test]
fn named_barriers() {
    let rounds = 4;
    let x: Vec<f32> = (0..64 * rounds).map(|i| i as f32).collect();
    let planted: [(usize, &[Kind]); 3] = [
        (1, &[Kind::Deadlock]),
        (2, &[Kind::Race, Kind::Uninitialized]),
        (3, &[Kind::Deadlock]),
    ];
    check(&planted, |emulator, number| {
        let to = emulator.allocate(4 * x.len() as u64).expect("memory");
        let args = [
            Arg::Address(input(emulator, &x)),
            Arg::Address(to),
            Arg::size(rounds),
        ];
        let grid = Grid::linear(1, 128, 256);
        let source = source("block", include_str!("tests/block.cu"));
        run(emulator, source, number, "hand_over", grid, &args)?;
        for (i, got) in output::<f32>(emulator, to, x.len()).into_iter().enumerate() {
            assert_eq!(got, 2.0 * x[i / 64 * 64 + 63 - i % 64], "element {i}");
        }
        Ok(())
    });
}

#[test]
fn copies_of_threads() {
    let x: Vec<f32> = (0..128).map(|i| i as f32).collect();
    let planted: [(usize, &[Kind]); 3] = [
        (1, &[Kind::InFlight]),
        (2, &[Kind::Race, Kind::Uninitialized]),
        (3, &[Kind::Misaligned]),
    ];
    check(&planted, |emulator, number| {
        let (from, to) = (input(emulator, &x), emulator.allocate(512).expect("memory"));
        let args = [Arg::Address(from), Arg::Address(to)];
        let grid = Grid::linear(1, 32, 512);
        run(
            emulator,
            source("block", include_str!("tests/block.cu")),
            number,
            "copy",
            grid,
            &args,
        )?;
        let got: Vec<f32> = output(emulator, to, 128);
        assert_eq!(got[..125], x[..125]);
        assert_eq!(got[125..], [0.0; 3], "past the valid bytes comes zero");
        Ok(())
    });
}

#[test]
fn blocks_of_a_launch() {
    let blocks = 5;
    let x: Vec<i32> = (0..64 * blocks as i32).collect();
    let planted: [(usize, &[Kind]); 3] =
        [(1, &[Kind::Race]), (2, &[Kind::Race]), (3, &[Kind::Race])];
    check(&planted, |emulator, number| {
        let from = input(emulator, &x);
        let (finished, sum) = (
            input(emulator, &[0u32]),
            emulator.allocate(4).expect("memory"),
        );
        let partial = emulator.allocate(4 * blocks as u64).expect("memory");
        let args = [from, partial, finished, sum].map(Arg::Address);
        let grid = Grid::linear(blocks, 64, 64);
        // Twice: what one launch leaves behind is in order with the next.
        for _ in 0..2 {
            run(
                emulator,
                source("blocks", include_str!("tests/blocks.cu")),
                number,
                "total",
                grid,
                &args,
            )?;
            assert_eq!(output::<i32>(emulator, sum, 1), [x.iter().sum::<i32>()]);
        }
        Ok(())
    });
}

#[test]
fn bulk_stores() {
    let rounds = 3;
    let planted: [(usize, &[Kind]); 5] = [
        (1, &[Kind::Unfenced]),
        (2, &[Kind::InFlight]),
        (3, &[Kind::Race]),
        (4, &[Kind::Misaligned]),
        (5, &[Kind::OutOfBounds]),
    ];
    check(&planted, |emulator, number| {
        // The last round ends ten rows past the tensor.
        let rows = 32 * rounds - 10;
        let to = emulator.allocate(128 * rows as u64).expect("memory");
        let map = TensorMap {
            address: to,
            dtype: Dtype::Bf16,
            dims: vec![64, rows as u64],
            strides: vec![128],
            tile: vec![64, 32],
            swizzle: Swizzle::None,
        };
        let map = emulator.encode(&map).expect("a map");
        let args = [Arg::Map(map), Arg::I32(rounds)];
        let grid = Grid::linear(1, 128, 4096);
        run(
            emulator,
            source("store", include_str!("tests/store.cu")),
            number,
            "store",
            grid,
            &args,
        )?;
        let got: Vec<u16> = output(emulator, to, 64 * rows as usize);
        assert!(got.iter().enumerate().all(|(i, got)| *got == i as u16));
        Ok(())
    });
}

#[test]
fn bulk_copies_of_what_was_written_to_device_memory() {
    let blocks = 4;
    let planted = [1, 2, 3, 4, 5].map(|number| (number, &[Kind::Unfenced][..]));
    check(&planted, |emulator, number| {
        let tiles = || {
            let address = emulator.allocate(1024 * blocks as u64).expect("memory");
            let map = TensorMap {
                address,
                dtype: Dtype::Bf16,
                dims: vec![64, 8 * blocks as u64],
                strides: vec![128],
                tile: vec![64, 8],
                swizzle: Swizzle::None,
            };
            (address, Arg::Map(emulator.encode(&map).expect("a map")))
        };
        let [(own, own_map), (handed, handed_map)] = [tiles(), tiles()];
        let turn = input(emulator, &[0u32, 0]);
        let out = emulator.allocate(2048 * blocks as u64).expect("memory");
        let [own, handed, turn, to] = [own, handed, turn, out].map(Arg::Address);
        run(
            emulator,
            source("relay", include_str!("tests/relay.cu")),
            number,
            "relay",
            Grid::linear(blocks, 32, 2048 + 8),
            &[own_map, handed_map, own, handed, turn, to],
        )?;
        let got: Vec<u16> = output(emulator, out, 1024 * blocks);
        for (i, got) in got.into_iter().enumerate() {
            let (block, tile, at) = (i / 1024, i / 512 % 2, i % 512);
            // Its own tile, and what was handed on from the first block, a tile further each time.
            let want = at + 512 * block + usize::from(tile == 1) * 7;
            assert_eq!(usize::from(got), want, "element {i}");
        }
        Ok(())
    });
}

#[test]
fn a_pipeline_of_bulk_loads_and_wgmma() {
    let (m, n, k) = (100, 72, 264);
    let values = |count: usize, step: usize| -> Vec<u16> {
        let value = |i: usize| (i * step % 17) as f32 - 8.0;
        (0..count).map(|i| bf16::narrow(value(i))).collect()
    };
    let (a, b) = (values(m * k, 7), values(n * k, 5));
    let planted: [(usize, &[Kind]); 9] = [
        (1, &[Kind::Race]),
        (2, &[Kind::Deadlock]),
        (3, &[Kind::Unfenced]),
        (4, &[Kind::InFlight]),
        (5, &[Kind::Unfenced]),
        (6, &[Kind::Race, Kind::Uninitialized]),
        (7, &[Kind::Race, Kind::Uninitialized]),
        (8, &[Kind::Race, Kind::Barrier]),
        (9, &[Kind::InFlight]),
    ];
    check(&planted, |emulator, number| {
        let map = |values: &[u16], rows: usize| {
            let map = TensorMap {
                address: input(emulator, values),
                dtype: Dtype::Bf16,
                dims: vec![k as u64, rows as u64],
                strides: vec![2 * k as u64],
                tile: vec![64, 64],
                swizzle: Swizzle::B128,
            };
            Arg::Map(emulator.encode(&map).expect("a map"))
        };
        let c = emulator.allocate(4 * (m * n) as u64).expect("memory");
        let sizes = [m, n, k].map(Arg::size);
        let args = [&[map(&a, m), map(&b, n), Arg::Address(c)], &sizes[..]].concat();
        let grid = Grid {
            blocks: [m.div_ceil(64) as u32, n.div_ceil(64) as u32, 1],
            threads: 256,
            shared: 2 * 3 * 8192 + 48,
        };
        run(
            emulator,
            source("gemm", include_str!("tests/gemm.cu")),
            number,
            "gemm",
            grid,
            &args,
        )?;
        let got: Vec<f32> = output(emulator, c, m * n);
        for (i, got) in got.into_iter().enumerate() {
            let (row, column) = (i / n, i % n);
            let term = |l| bf16::widen(a[row * k + l]) * bf16::widen(b[column * k + l]);
            let want: f32 = (0..k).map(term).sum();
            assert_eq!(got, want, "[{row}, {column}]");
        }
        Ok(())
    });
}
