//! One warp or two warpgroups: fragments, shuffles, cp.async, atomics, barriers, numbers.

use super::{
    Case, Words, download, launch, pair, pairs, product, register_a, room, upload, value_b,
};
use crate::bf16;
use crate::cuda::program::{Arg, Entry, Listed, Needs, Program, Source, source};
use crate::device::Device;

const SOURCE: Source = source!("model", "../model.cu");
const HOPPER: Source = source!("model_sm90", "../model_sm90.cu");

fn program() -> Program {
    SOURCE.with(&[])
}

pub(super) fn hopper_program() -> Program {
    HOPPER.with(&[])
}

pub(super) fn cases() -> Vec<Case> {
    vec![
        Case::new("ldmatrix", ldmatrix),
        Case::new("mma.m16n8k16", mma),
        Case::new("shuffles and ballot", lanes),
        Case::new("2^x, bf16, min and max", numbers),
        Case::new("cp.async of 0 to 16 bytes", copy),
        Case::new("atomics", atomics),
        Case::new("named barriers between warpgroups", hand_over),
    ]
}

pub(super) fn hopper_cases() -> Vec<Case> {
    vec![
        Case::new("stmatrix", stmatrix),
        Case::new("phases of an mbarrier", mbarrier),
    ]
}

pub(super) fn programs() -> Vec<Listed> {
    let any = Listed {
        program: program(),
        needs: Needs::Sm80,
        entries: vec![
            shows("model_ldmatrix", 512, &["LDSM"]),
            shows("model_mma", 0, &["HMMA"]),
            shows("model_lanes", 0, &["SHFL"]),
            shows("model_numbers", 0, &["MUFU.EX2"]),
            shows("model_copy", 512, &["LDGSTS"]),
            shows("model_atomics", 0, &[]),
            shows("model_hand_over", 512, &["BAR.ARV"]),
        ],
    };
    let hopper = Listed {
        program: hopper_program(),
        needs: Needs::Wgmma,
        entries: vec![
            shows("model_stmatrix", 512, &["STSM"]),
            shows("model_mbarrier", 8, &["SYNCS"]),
            shows("model_load", 1 << 15, &["UTMALDG"]),
            shows("model_store", 1 << 15, &["UTMASTG", "UTMAREDG"]),
        ],
    };
    vec![any, hopper]
}

fn shows(name: &'static str, shared: usize, shows: &'static [&'static str]) -> Entry {
    Entry {
        shows,
        ..Entry::plain(name, 64, shared)
    }
}

/// Four matrices of 8x8 different elements, row by row: matrix, row, column.
fn element(matrix: usize, row: usize, column: usize) -> u16 {
    (1000 * matrix + 10 * row + column + 1) as u16
}

fn matrices() -> Vec<u32> {
    let all = (0..256).map(|i| element(i / 64, i / 8 % 8, i % 8));
    pairs(&all.collect::<Vec<_>>())
}

/// Registers `[lane][matrix]` as the PTX ISA's figure of an 8x8 fragment has them.
fn registers(count: usize, transposed: bool) -> Vec<u32> {
    let register = |i: usize| {
        let (lane, matrix) = (i / count, i % count);
        let (row, column) = (lane / 4, lane % 4 * 2);
        if transposed {
            pair(
                element(matrix, column, row),
                element(matrix, column + 1, row),
            )
        } else {
            pair(
                element(matrix, row, column),
                element(matrix, row, column + 1),
            )
        }
    };
    (0..32 * count).map(register).collect()
}

fn ldmatrix(device: &Device) -> Words {
    let from = upload(device, &matrices());
    let out = [128, 128, 64, 64].map(|words| room(device, words));
    let args = [&from, &out[0], &out[1], &out[2], &out[3]].map(Arg::from);
    launch(device, &program(), "model_ldmatrix", 32, 512, &args);
    Words {
        got: download(&out.each_ref()),
        want: [
            registers(4, false),
            registers(4, true),
            registers(2, false),
            registers(2, true),
        ]
        .concat(),
    }
}

fn stmatrix(device: &Device) -> Words {
    let out = [128, 128].map(|words| room(device, words));
    let from = upload(device, &registers(4, false));
    let args = [&from, &out[0], &out[1]].map(Arg::from);
    launch(device, &hopper_program(), "model_stmatrix", 32, 512, &args);
    // Registers of plain fragments, stored transposed, give transposed matrices.
    let transposed = (0..256).map(|i| element(i / 64, i % 8, i / 8 % 8));
    let transposed = pairs(&transposed.collect::<Vec<_>>());
    Words {
        got: download(&out.each_ref()),
        want: [matrices(), transposed].concat(),
    }
}

fn mma(device: &Device) -> Words {
    let a: Vec<u32> = (0..128).map(|i| register_a(i / 4, i % 4)).collect();
    let b = (0..64).map(|i| {
        let (lane, k) = (i / 2, i / 2 % 4 * 2 + i % 2 * 8);
        let element = |k| bf16::narrow(value_b(k, lane / 4));
        pair(element(k), element(k + 1))
    });
    let (a, b) = (upload(device, &a), upload(device, &b.collect::<Vec<_>>()));
    let d = room(device, 128);
    launch(
        device,
        &program(),
        "model_mma",
        32,
        0,
        &[&a, &b, &d].map(Arg::from),
    );
    let want = |i: usize| {
        let (lane, i) = (i / 4, i % 4);
        let row = lane / 4 + if i >= 2 { 8 } else { 0 };
        product(row, lane % 4 * 2 + i % 2, 16)
    };
    Words {
        got: download(&[&d]),
        want: (0..128).map(want).collect(),
    }
}

fn lanes(device: &Device) -> Words {
    let out = room(device, 160);
    launch(device, &program(), "model_lanes", 32, 0, &[Arg::from(&out)]);
    let want = |lane: u32| {
        let up = if lane < 3 { lane } else { lane - 3 };
        let down = if lane > 28 { lane } else { lane + 3 };
        [lane ^ 5, 9, up, down, 0xaaaa_aaaa]
    };
    Words {
        got: download(&[&out]),
        want: (0..32).flat_map(want).collect(),
    }
}

fn numbers(device: &Device) -> Words {
    // A number, 2^x as f32, and the number as bf16: ties to even, overflow, subnormals, NaN.
    let table: [(u32, u32, u16); 14] = [
        (0x0000_0000, 0x3f80_0000, 0x0000),
        (0x8000_0000, 0x3f80_0000, 0x8000),
        (0xff80_0000, 0x0000_0000, 0xff80),
        (0x7f80_0000, 0x7f80_0000, 0x7f80),
        // -127, -150 and -0x1.01p7: below the normal numbers.
        (0xc2fe_0000, 0x0000_0000, 0xc2fe),
        (0xc316_0000, 0x0000_0000, 0xc316),
        (0xc300_8000, 0x0000_0000, 0xc300),
        // 200.5, 129 and the largest number.
        (0x4348_8000, 0x7f80_0000, 0x4348),
        (0x4301_8000, 0x7f80_0000, 0x4302),
        (0x7f7f_ffff, 0x7f80_0000, 0x7f80),
        // Half a place and a bit more, negative.
        (0xc380_8001, 0x0000_0000, 0xc381),
        (0xc380_8000, 0x0000_0000, 0xc380),
        // Subnormal.
        (0x0001_8000, 0x3f80_0000, 0x0002),
        (0x0000_8000, 0x3f80_0000, 0x0000),
    ];
    let mut x: Vec<u32> = table.iter().map(|row| row.0).collect();
    x.resize(32, 0x3f80_0000);
    let from = upload(device, &x);
    let out = room(device, 128);
    let args = [&from, &out].map(Arg::from);
    launch(device, &program(), "model_numbers", 32, 0, &args);
    let mut got = download(&[&out]);
    got.truncate(4 * table.len());
    let row = |&(x, power, narrow): &(u32, u32, u16)| {
        let x = f32::from_bits(x);
        let one = pair(narrow, bf16::narrow(1.0));
        [power, one, x.max(1.0).to_bits(), x.min(1.0).to_bits()]
    };
    Words {
        got,
        want: table.iter().flat_map(row).collect(),
    }
}

fn copy(device: &Device) -> Words {
    let word = |i: u32| 0x0101_0101 * (i + 1);
    let from: Vec<u32> = (0..128).map(word).collect();
    let (from, out) = (upload(device, &from), room(device, 128));
    let args = [&from, &out].map(Arg::from);
    launch(device, &program(), "model_copy", 32, 512, &args);
    let want = |i: u32| {
        let valid = (i / 4 % 17).saturating_sub(4 * (i % 4)).min(4);
        word(i) & (0xffff_ffff_u64 >> (32 - 8 * valid)) as u32
    };
    Words {
        got: download(&[&out]),
        want: (0..128).map(want).collect(),
    }
}

fn atomics(device: &Device) -> Words {
    let half = 1.5f32.to_bits();
    let words = upload(device, &[1, half, 0x8000_0000, 8, 0]);
    let out = room(device, 14);
    let args = [&words, &out].map(Arg::from);
    launch(device, &program(), "model_atomics", 32, 0, &args);
    let before = [1, 6, half, 0x8000_0000, 3, 8, 9, 9, 11];
    let after = [u32::MAX, 2f32.to_bits(), 0xffff_fff0, 2, 11];
    Words {
        got: download(&[&out]),
        want: [&before[..], &after].concat(),
    }
}

fn hand_over(device: &Device) -> Words {
    const ROUNDS: u32 = 5;
    let x: Vec<u32> = (0..128 * ROUNDS).collect();
    let (from, out) = (upload(device, &x), room(device, x.len()));
    let args = [Arg::from(&from), Arg::from(&out), Arg::I32(ROUNDS as i32)];
    launch(device, &program(), "model_hand_over", 256, 512, &args);
    Words {
        got: download(&[&out]),
        want: x
            .iter()
            .map(|i| 2 * (i / 128 * 128 + 127 - i % 128))
            .collect(),
    }
}

fn mbarrier(device: &Device) -> Words {
    let out = room(device, 12);
    let args = [Arg::from(&out)];
    launch(device, &hopper_program(), "model_mbarrier", 32, 8, &args);
    Words {
        got: download(&[&out]),
        want: [[0, 1, 0, 1, 0, 0], [0, 1, 0, 1, 0, 1]].concat(),
    }
}
