//! Products of a warpgroup: fragments, and operands that lie in shared memory under a descriptor.

use super::{
    Case, Words, download, launch, pairs, product, register_a, room, swizzled_piece, upload,
    value_a, value_b,
};
use crate::bf16;
use crate::cuda::program::{Arg, Define, Entry, Listed, Needs, Program, Source, source};
use crate::device::Device;

const SOURCE: Source = source!("model_sm90", "../model_sm90.cu");

/// An operand of a wgmma in shared memory: `lines` rows of A or columns of B.
#[derive(Debug, Clone, Copy)]
struct Operand {
    /// Bytes of a swizzled row, 16 for none.
    row_bytes: usize,
    /// M- or N-major.
    transposed: bool,
    lines: usize,
    depth: usize,
}

impl Operand {
    /// Fields of the descriptor, and the step from one 16 of the depth to the next, in bytes.
    fn fields(&self) -> [usize; 3] {
        let eight_rows = 8 * self.row_bytes;
        let eights = self.lines.div_ceil(8);
        match (self.row_bytes, self.transposed) {
            // Eight rows of 16 bytes; eights of lines follow each other, then eights of the depth.
            (16, false) => [128 * eights, 128, 256 * eights],
            // Eights of the depth follow each other, then eights of lines.
            (16, true) => [128, 16 * self.depth, 256],
            // The leading offset has no meaning here.
            (_, false) => [16, eight_rows, 32],
            // Panels of as many lines as a row holds, one after another.
            (_, true) => [self.row_bytes * self.depth, eight_rows, 2 * eight_rows],
        }
    }

    /// Where element (`line`, `k`) lies.
    fn place(&self, line: usize, k: usize) -> usize {
        let [leading, stride, _] = self.fields();
        if self.row_bytes == 16 {
            return if self.transposed {
                line / 8 * stride + k / 8 * leading + k % 8 * 16 + line % 8 * 2
            } else {
                line / 8 * stride + k / 8 * leading + line % 8 * 16 + k % 8 * 2
            };
        }
        let wide = self.row_bytes / 2;
        let (row, column, panel) = if self.transposed {
            (k, line % wide, line / wide)
        } else {
            (line, k, 0)
        };
        let piece = swizzled_piece(self.row_bytes, row % 8, column / 8);
        panel * leading + row / 8 * stride + row % 8 * self.row_bytes + piece * 16 + column % 8 * 2
    }

    /// The shared memory that holds it; what no element is in is a NaN.
    fn image(&self, value: impl Fn(usize, usize) -> f32) -> Vec<u32> {
        let lines = self.lines.next_multiple_of(self.row_bytes / 2);
        let mut image = vec![0x7fff; lines * self.depth.max(self.row_bytes / 2)];
        for line in 0..self.lines {
            for k in 0..self.depth {
                image[self.place(line, k) / 2] = bf16::narrow(value(line, k));
            }
        }
        pairs(&image)
    }
}

/// A product of 64 rows.
#[derive(Debug, Clone, Copy)]
struct Product {
    columns: usize,
    row_bytes: usize,
    transpose: [bool; 2],
    a_registers: bool,
    /// Columns of B, M- or N-major, that lie before those of the product in the same swizzled rows.
    skipped: usize,
}

impl Product {
    /// As deep as one swizzled row; without swizzle, and with A in registers, as one instruction.
    fn depth(&self) -> usize {
        if self.a_registers {
            16
        } else {
            (self.row_bytes / 2).max(16)
        }
    }

    fn program(&self) -> Program {
        SOURCE.with(&[
            Define::int("COLUMNS", self.columns),
            Define::flag("TRANSPOSE_A", self.transpose[0]),
            Define::flag("TRANSPOSE_B", self.transpose[1]),
            Define::flag("A_REGISTERS", self.a_registers),
        ])
    }

    fn run(&self, device: &Device) -> Words {
        let depth = self.depth();
        let operand = |transposed, lines| Operand {
            row_bytes: self.row_bytes,
            transposed,
            lines,
            depth,
        };
        let a = operand(self.transpose[0], 64);
        let b = operand(self.transpose[1], self.skipped + self.columns);
        let image_a = if self.a_registers {
            (0..512).map(|i| register_a(i / 4, i % 4)).collect()
        } else {
            a.image(value_a)
        };
        let image_b = b.image(|line, k| {
            let column = line.checked_sub(self.skipped);
            column.map_or(f32::NAN, |column| value_b(k, column))
        });
        let out = room(device, 64 * self.columns);
        let tensors = [upload(device, &image_a), upload(device, &image_b)];
        let mut args = Vec::new();
        for (operand, tensor) in [a, b].into_iter().zip(&tensors) {
            args.extend([Arg::from(tensor), Arg::size(4 * tensor.len())]);
            args.extend(operand.fields().map(Arg::size));
        }
        let code = match self.row_bytes {
            128 => 1,
            64 => 2,
            32 => 3,
            _ => 0,
        };
        let sizes = [2 * self.skipped, code, depth / 16].map(Arg::size);
        args.extend(sizes);
        args.push(Arg::from(&out));
        let shared = (4 * image_a.len()).next_multiple_of(1024) + 4 * image_b.len();
        launch(device, &self.program(), "model_wgmma", 128, shared, &args);
        let own = self.columns / 2;
        let want = |i: usize| {
            let (t, i) = (i / own, i % own);
            let row = t / 32 * 16 + t % 32 / 4 + if i % 4 >= 2 { 8 } else { 0 };
            product(row, i / 4 * 8 + t % 4 * 2 + i % 2, depth)
        };
        Words {
            got: download(&[&out]),
            want: (0..64 * self.columns).map(want).collect(),
        }
    }
}

fn products() -> Vec<Product> {
    let majors = [[false, false], [false, true], [true, false], [true, true]];
    let mut all = Vec::new();
    for row_bytes in [16, 32, 64, 128] {
        for transpose in majors {
            all.push(Product {
                columns: 96,
                row_bytes,
                transpose,
                a_registers: false,
                skipped: 0,
            });
        }
        for transposed in [false, true] {
            all.push(Product {
                columns: 96,
                row_bytes,
                transpose: [false, transposed],
                a_registers: true,
                skipped: 0,
            });
        }
    }
    for columns in [8, 16, 32, 48, 64, 80, 112, 128, 160, 192, 224, 256] {
        all.push(Product {
            columns,
            row_bytes: 128,
            transpose: majors[columns / 16 % 4],
            a_registers: columns % 32 == 16,
            skipped: 0,
        });
    }
    // Half of the columns of a panel, as backward attention takes those of dq.
    all.push(Product {
        columns: 32,
        row_bytes: 128,
        transpose: [true, true],
        a_registers: false,
        skipped: 32,
    });
    all
}

pub(super) fn cases() -> Vec<Case> {
    let named = products().into_iter().map(|product| {
        let major = |transposed| if transposed { "MN" } else { "K" };
        let a = match (product.a_registers, product.transpose[0]) {
            (true, _) => "registers",
            (false, transposed) => major(transposed),
        };
        let from = match product.skipped {
            0 => String::new(),
            columns => format!(" from column {columns} on"),
        };
        let name = format!(
            "wgmma m64n{}k{}, a {a}, b {}{from}, rows of {} bytes",
            product.columns,
            product.depth(),
            major(product.transpose[1]),
            product.row_bytes
        );
        Case::new(name, move |device| product.run(device))
    });
    named.collect()
}

pub(super) fn programs() -> Vec<Listed> {
    let mut listed: Vec<Listed> = Vec::new();
    for product in products() {
        let program = product.program();
        if listed.iter().any(|other| other.program == program) {
            continue;
        }
        // The accumulators, and addresses.
        let registers = product.columns as u32 / 2 + 64;
        listed.push(Listed {
            program,
            needs: Needs::Wgmma,
            entries: vec![Entry {
                shows: &["HGMMA"],
                // Two operands of at most 64 and 256 lines, 128 bytes each.
                ..Entry::plain("model_wgmma", registers, (64 + 256) * 128)
            }],
        });
    }
    listed
}
