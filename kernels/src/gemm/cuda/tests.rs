//! Every tile of every kernel gives the same bits, and touches nothing that is not its own.

use super::*;
use crate::TensorClass;
use crate::device::Backend;
use crate::emulated::{emulated, on_every_device};
use crate::testing::{Rng, assert_bits, integers, tensor};

/// Forward, dgrad and wgrad of three experts with every tile. A block has several tiles, of which the first leaves while the
/// next is computed, one of them without rows for the second half; sums have fewer stages than a tile has panels, and more.
#[test]
fn law_bits_do_not_depend_on_the_tile() {
    on_every_device(1, |device| {
        let Backend::Cuda(gpu) = &device.0.backend else {
            return;
        };
        if device.dtype() != Dtype::Bf16 {
            return;
        }
        let mut rng = Rng::new(1);
        let depths = |(ta, tb, c, _): &(Trans, Trans, Dtype, &[bool])| {
            [40, 392].map(|depth| (*ta, *tb, *c, depth))
        };
        for (ta, tb, dtype, depth) in LAYER.iter().flat_map(depths) {
            let [m, n, k] = match ta {
                Trans::No => [328, 200, depth],
                Trans::Yes => [328, 200, 96 + depth],
            };
            let grouped = if ta == Trans::No { m } else { k };
            let offsets = integers(device, &[0, 66, 66, grouped as i32], &[4]);
            let (a, b, c) = match (ta, tb) {
                (Trans::No, Trans::Yes) => ([m, k].to_vec(), vec![3, n, k], vec![m, n]),
                (Trans::No, Trans::No) => ([m, k].to_vec(), vec![3, k, n], vec![m, n]),
                (Trans::Yes, _) => ([k, m].to_vec(), vec![k, n], vec![3, m, n]),
            };
            let random = |rng: &mut Rng, dims: &[usize]| {
                tensor(device, &rng.values(dims.iter().product()), dims)
            };
            let (a, b) = (random(&mut rng, &a), random(&mut rng, &b));
            let run = |launch: &dyn Fn(&Product)| {
                let c = device.empty(TensorClass::Activations, dtype, &c);
                // A group without rows keeps its C.
                c.fill_zero();
                let product = Product {
                    op: "test",
                    a: ((&a).into(), ta),
                    b: ((&b).into(), tb),
                    c: (&c).into(),
                    bias: None,
                    sizes: [m, n, k],
                    beta: if ta == Trans::Yes { 1.0 } else { 0.0 },
                    offsets: Some(&offsets),
                };
                launch(&product);
                c.to_f32()
            };
            let name = |tile: Tile| format!("{ta:?} {tb:?} {dtype:?} {k} {tile:?} on {device:?}");
            let all = TILES.map(|tile| (tile, run(&|product| product.on_tensor_cores(gpu, tile))));
            assert_bits(&name(all[1].0), &all[1].1, &all[0].1, 1);
            if gpu.architecture().has_wgmma() {
                let tiles = hopper::tiles(dtype);
                let all: Vec<_> = tiles
                    .iter()
                    .map(|&tile| {
                        run(&|product| {
                            assert!(hopper::can(gpu, product));
                            hopper::launch(gpu, product, tile);
                        })
                    })
                    .collect();
                for (tile, found) in tiles.iter().zip(&all).skip(1) {
                    assert_bits(&name(*tile), found, &all[0], 1);
                }
            }
        }
    });
}

#[test]
fn law_tiles_are_wide_where_there_is_work() {
    let Some(device) = emulated(1).into_iter().find(|d| d.dtype() == Dtype::Bf16) else {
        return;
    };
    let best = |m: usize, n: usize| {
        let empty = |dims: &[usize]| device.empty(TensorClass::Activations, Dtype::Bf16, dims);
        let (a, b, c) = (empty(&[m, 8]), empty(&[n, 8]), empty(&[m, n]));
        let product = Product {
            op: "test",
            a: ((&a).into(), Trans::No),
            b: ((&b).into(), Trans::Yes),
            c: (&c).into(),
            bias: None,
            sizes: [m, n, 8],
            beta: 0.0,
            offsets: None,
        };
        Tile::best(hopper::tiles(c.dtype()), &product, 132).n
    };
    assert_eq!(best(16384, 4096), 256);
    assert_eq!(best(16384, 576), 192, "576 is three times that");
    assert_eq!(
        best(128, 2048),
        128,
        "sixteen tiles for 132 multiprocessors"
    );
}

/// What the library reads of groups, whichever side of the product they are on.
#[test]
fn oracle_tables_of_groups() {
    on_every_device(1, |device| {
        let Backend::Cuda(gpu) = &device.0.backend else {
            return;
        };
        let offsets = integers(device, &[0, 3, 3, 7], &[4]);
        let dtype = device.dtype();
        let size = dtype.bytes(1).0;
        let empty = |dims: &[usize]| device.empty(TensorClass::Activations, dtype, dims);
        let [m, n, k] = [9, 16, 8];
        for (ta, tb) in [
            (Trans::No, Trans::Yes),
            (Trans::No, Trans::No),
            (Trans::Yes, Trans::No),
        ] {
            let sums = ta == Trans::Yes;
            let (a, b, c) = match (sums, tb) {
                (false, Trans::Yes) => (empty(&[m, k]), empty(&[3, n, k]), empty(&[m, n])),
                (false, Trans::No) => (empty(&[m, k]), empty(&[3, k, n]), empty(&[m, n])),
                (true, _) => (empty(&[k, m]), empty(&[k, n]), empty(&[3, m, n])),
            };
            let product = Product {
                op: "test",
                a: ((&a).into(), ta),
                b: ((&b).into(), tb),
                c: (&c).into(),
                bias: None,
                sizes: [m, n, k],
                beta: 0.0,
                offsets: Some(&offsets),
            };
            let tables = product.tables(gpu, &offsets).to_i32();
            let word = |at: usize| u64::from(tables[at] as u32);
            let read = |at: usize| word(2 * at) | word(2 * at + 1) << 32;
            for (group, (first, count)) in [(0, 3), (3, 0), (3, 4)].into_iter().enumerate() {
                let at = |t: &Tensor, elements: usize| t.address().0 + elements as u64 * size;
                let wanted = if sums {
                    [
                        at(&a, first * m),
                        at(&b, first * n),
                        at(&c, group * m * n),
                        m as u64,
                        n as u64,
                        count as u64,
                    ]
                } else {
                    [
                        at(&a, first * k),
                        at(&b, group * n * k),
                        at(&c, first * n),
                        count as u64,
                        n as u64,
                        k as u64,
                    ]
                };
                let pitches = [&a, &b, &c].map(|t| t.width() as u64);
                let found: Vec<u64> = (0..9).map(|field| read(field * 3 + group)).collect();
                assert_eq!(
                    found,
                    [&wanted[..], &pitches].concat(),
                    "{ta:?} {tb:?} {group}"
                );
            }
        }
    });
}
