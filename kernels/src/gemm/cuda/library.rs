//! Products by the vendor's library: dense ones where it is found, grouped ones where the device was
//! told to prefer it ([`crate::Device::prefer_library`]).

use moefold_profiles::Dtype;

use super::{Product, View};
use crate::cuda::Cuda;
use crate::cuda::platform::{Address, Dense, Field, Grouped, Matrix};
use crate::cuda::program::{Arg, Entry, Grid, Listed, Needs, Program, Source, source};
use crate::device::TensorClass;
use crate::gemm::Trans;
use crate::tensor::Tensor;

const TABLES: Source = source!("grouped_tables", "../../grouped_tables.cu");

const THREADS: u32 = 128;

impl Product<'_> {
    /// Hands the product to the library; false where that does not do it.
    pub(super) fn library(&self, gpu: &Cuda) -> bool {
        match self.offsets {
            None => self.dense(gpu),
            Some(offsets) => gpu.prefers_library() && self.grouped(gpu, offsets),
        }
    }

    fn dense(&self, gpu: &Cuda) -> bool {
        let [m, n, k] = self.sizes;
        let [a, b, c] = self.views().map(|view| view.dtype());
        // The library takes a bias of C's dtype.
        if k == 0 || a != b || (self.bias.is_some() && b != c) {
            return false;
        }
        let matrix = |view: View<'_>, trans| Matrix {
            address: view.address(),
            dtype: view.dtype(),
            row_stride: view.pitch(),
            transposed: trans == Trans::Yes,
        };
        gpu.dense(&Dense {
            op: self.op,
            m,
            n,
            k,
            a: matrix(self.a.0, self.a.1),
            b: matrix(self.b.0, self.b.1),
            c: matrix(self.c, Trans::No),
            bias: self.bias.map(Tensor::address),
            beta: self.beta,
        })
    }

    /// Whether the library has kernels for these operands: bf16, 16-byte pieces, and B as it lies where
    /// groups share what is summed over.
    fn suits_groups(&self) -> bool {
        let views = self.views();
        let sums = self.a.1 == Trans::Yes;
        [views[0], views[1]].map(|view| view.dtype()) == [Dtype::Bf16; 2]
            && views.iter().all(View::is_wide)
            && !self.sizes.contains(&0)
            && self.bias.is_none()
            && !(sums && self.b.1 == Trans::Yes)
    }

    fn grouped(&self, gpu: &Cuda, offsets: &Tensor) -> bool {
        if !self.suits_groups() {
            return false;
        }
        let tables = self.tables(gpu, offsets);
        let (sums, groups) = (self.a.1 == Trans::Yes, self.groups());
        // Of what is grouped the host knows the whole alone; its average is not asked about anew for
        // every number of rows.
        let mut average = self.sizes;
        let shared = if sums {
            &mut average[2]
        } else {
            &mut average[0]
        };
        *shared = shared.div_ceil(groups).next_power_of_two();
        gpu.grouped(&Grouped {
            op: self.op,
            groups,
            tables: tables.address(),
            average,
            transposed: [self.a.1, self.b.1].map(|trans| trans == Trans::Yes),
            input: self.a.0.dtype(),
            output: self.c.dtype(),
            beta: self.beta,
        })
    }

    /// What the library reads of every group: [`Field::COUNT`] tables of 64-bit numbers, made on the
    /// device from its offsets.
    pub(super) fn tables(&self, gpu: &Cuda, offsets: &Tensor) -> Tensor {
        let groups = self.groups();
        let [m, n, k] = self.sizes;
        let (trans_a, trans_b) = (self.a.1, self.b.1);
        let rows_b = if trans_b == Trans::Yes { n } else { k };
        // Two words of i32 a number, for which there is no dtype.
        let dims = [Field::COUNT, groups, 2];
        let tables = offsets
            .device()
            .empty(TensorClass::Transient, Dtype::I32, &dims);
        let Address(a) = self.a.0.address();
        let Address(b) = self.b.0.address();
        let Address(c) = self.c.address();
        let bytes = |view: &View<'_>| Arg::size(view.dtype().bytes(1).0 as usize);
        let [pitch_a, pitch_b, pitch_c] = self.views().map(|view| Arg::size(view.pitch()));
        gpu.launch(
            self.op,
            &tables_program(),
            "grouped_tables",
            Grid::linear(groups.div_ceil(THREADS as usize), THREADS, 0),
            &[
                Arg::U64(a),
                Arg::U64(b),
                Arg::U64(c),
                offsets.into(),
                (&tables).into(),
                Arg::size(groups),
                Arg::size(m),
                Arg::size(n),
                Arg::size(k),
                Arg::size(rows_b),
                pitch_a,
                pitch_b,
                pitch_c,
                bytes(&self.a.0),
                bytes(&self.c),
                Arg::size(usize::from(trans_a == Trans::Yes)),
            ],
        );
        tables
    }
}

fn tables_program() -> Program {
    TABLES.with(&[])
}

/// What is launched, with its limits.
pub(super) fn programs() -> Vec<Listed> {
    vec![Listed {
        program: tables_program(),
        needs: Needs::Sm80,
        entries: vec![Entry::plain("grouped_tables", 64, 0)],
    }]
}
