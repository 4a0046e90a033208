//! Prices of matrix products, dense and grouped, from shipped tables over the efficiency formulas.

use super::lender;
use super::roofline::{MATRIX_DTYPES, Roofline, TILE, dtype_index, pass_rate};
use super::surface::{Point, SHIPPED, Surface};
use crate::cluster::Gpu;
use crate::cost::Source;
use crate::dtype::Dtype;
use crate::op::{Op, Pass};
use crate::presets;
use crate::table;

/// Sizes that product tables reach: `m` and `k` are tokens in turn.
const REACH: [[f64; 2]; 3] = [[1.0, 262_144.0], [8.0, 262_144.0], [8.0, 262_144.0]];

/// Rows that a group loses to its last tile: half of one, which for few rows is half as high as [`TILE`].
const GROUP_PADDING: f64 = TILE / 4.0;

/// The same on a CPU, where packing a group's weights takes longer than its last tile: what is left of the differences
/// between groups of 64 and of 118 to 390 rows (7 to 32 by pass, quickstart under TP2 and under EP2 on two cores of an AMD EPYC,
/// 2026-11-27).
const GROUP_PADDING_OF_CPU: f64 = 16.0;

/// Fewest groups for which the time of a group is taken as that of many.
const MANY_GROUPS: f64 = 16.0;

/// Whether clocks are those of a product that runs by itself, or those that many in a row leave.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Held {
    /// As tables of kernels have it, and what measurements made here are laid over: they say themselves how clocks were.
    ByItself,
    /// As in training ([`crate::cluster::Gpu::sustained_share`]).
    AmongOthers,
}

/// Matrix products on one device.
#[derive(Debug, Clone)]
pub(super) struct Matrix {
    roofline: Roofline,
    /// Dense forward products by dtype.
    dense: [Option<Surface>; 4],
    /// Time of one of many groups over rows of a group, n and k; by dtype and pass.
    grouped: Vec<(Dtype, Pass, Surface)>,
    derate: Derate,
    /// Whether the tables were measured on this very device.
    own: bool,
}

/// Rate of grouped products of training relative to a dense forward product of all rows, after their
/// traffic is counted. Fitted to SimuMax@4dcaae51's Transformer Engine rows: A100 (four shapes a pass,
/// mean error 2 to 6%) and B200 (20 shapes a pass, 9 to 19%). fp8 on Blackwell: 2672 TFLOP/s of MXFP8
/// groups of 7168 x 2048 that NVIDIA's GB200 guide for Megatron-Core reports.
#[derive(Debug, Clone, Copy)]
struct Derate {
    bf16: [f64; 3],
    narrow: f64,
}

impl Derate {
    fn of(arch: &str) -> Self {
        match arch {
            "sm_100" | "sm_103" => Self {
                bf16: [0.68, 0.64, 0.60],
                narrow: 0.8,
            },
            "cpu" => Self {
                bf16: [1.0; 3],
                narrow: 1.0,
            },
            _ => Self {
                bf16: [0.88, 0.88, 1.0],
                narrow: 0.88,
            },
        }
    }

    fn at(self, dtype: Dtype, pass: Pass) -> f64 {
        match (dtype, pass) {
            (Dtype::Fp8 | Dtype::Fp4, _) => self.narrow,
            (_, Pass::Forward | Pass::Backward) => self.bf16[0],
            (_, Pass::Dgrad) => self.bf16[1],
            (_, Pass::Wgrad) => self.bf16[2],
        }
    }
}

impl Matrix {
    pub(super) fn new(gpu: &Gpu) -> Self {
        let roofline = Roofline::new(gpu);
        let name = gpu.name.to_lowercase();
        let lender = [Some(name.as_str()), lender::of_products(&name)]
            .into_iter()
            .flatten()
            .find(|name| table::gemm().iter().any(|row| row.gpu == *name))
            .map(|name| presets::gpu(name).expect("tables are of presets"));
        let dense = MATRIX_DTYPES.map(|dtype| {
            let lender = lender.as_ref()?;
            let measured_on = Roofline::new(lender);
            let rows = table::gemm().iter();
            let rows = rows.filter(|row| row.gpu == lender.name && row.dtype == dtype);
            let base = |[m, n, k]: [f64; 3]| roofline.gemm(m, n, k, dtype);
            let points: Vec<Point> = rows
                .map(|row| {
                    let at = row.shape.map(|size| size as f64);
                    // Utilisation carries over to a device with other peaks, not time.
                    let slower = base(at) / measured_on.gemm(at[0], at[1], at[2], dtype);
                    Point {
                        at,
                        time: flops(row.shape) / (row.tflops * 1e12) * slower,
                    }
                })
                .collect();
            (!points.is_empty()).then(|| Surface::new(&points, base, SHIPPED, REACH))
        });
        let mut matrix = Self {
            roofline,
            dense,
            grouped: Vec::new(),
            derate: Derate::of(&gpu.arch),
            own: lender.is_none_or(|lender| same_silicon(&lender, gpu)),
        };
        matrix.add_grouped(gpu);
        matrix
    }

    /// Lays the grouped rows of the device, if there are any, over the formula.
    fn add_grouped(&mut self, gpu: &Gpu) {
        let here = |row: &&table::GroupedRow| gpu.name.eq_ignore_ascii_case(row.gpu);
        let Some(first) = table::grouped_gemm().iter().find(here) else {
            return;
        };
        let preset = presets::gpu(first.gpu).expect("tables are of presets");
        let measured_on = if same_silicon(&preset, gpu) {
            None
        } else {
            Some(Self::new(&preset))
        };
        for dtype in MATRIX_DTYPES {
            for pass in [Pass::Forward, Pass::Dgrad, Pass::Wgrad] {
                let each = |matrix: &Self, [rows, n, k]: [f64; 3]| {
                    let sizes = [MANY_GROUPS, MANY_GROUPS * rows, n, k];
                    matrix.grouped_base(sizes, pass, dtype, Held::AmongOthers).0 / MANY_GROUPS
                };
                let base = |at: [f64; 3]| each(self, at);
                let rows = table::grouped_gemm().iter().filter(here);
                let rows = rows.filter(|row| row.dtype == dtype && row.pass == pass);
                let points: Vec<Point> = rows
                    .map(|row| {
                        let [n, k] = row.widths;
                        let shape = [row.rows_per_group, n, k];
                        let at = shape.map(|size| size as f64);
                        let slower = measured_on
                            .as_ref()
                            .map_or(1.0, |preset| base(at) / each(preset, at));
                        Point {
                            at,
                            time: flops(shape) / (row.tflops * 1e12) * slower,
                        }
                    })
                    .collect();
                if !points.is_empty() {
                    let surface = Surface::new(&points, base, SHIPPED, REACH);
                    self.grouped.push((dtype, pass, surface));
                }
            }
        }
    }

    /// Seconds of a dense product: by itself, or [among others](Held::AmongOthers).
    pub(super) fn gemm(&self, op: &Op, held: Held) -> (f64, Source) {
        let &Op::Gemm {
            m,
            n,
            k,
            pass,
            dtype,
        } = op
        else {
            unreachable!("the caller matched a dense product");
        };
        let at = [m, n, k].map(|size| size.max(1) as f64);
        let (time, source) = self.dense(at, dtype);
        let [rows, columns] = [at[0], at[1]].map(|size| self.roofline.in_tiles(size));
        let least = self.least(2.0 * rows * columns * at[2], dtype, held);
        let (time, source) = if time < least {
            (least, source.max(Source::Interpolated))
        } else {
            (time, source)
        };
        match pass {
            Pass::Forward => (time, source),
            Pass::Dgrad | Pass::Backward => (time, source.max(Source::Interpolated)),
            Pass::Wgrad => {
                // The table's product writes bf16 once; this one reads and writes f32.
                let extra = self.roofline.stream(6.0 * m as f64 * n as f64);
                let time = (time / pass_rate(pass)).hypot(extra);
                (time, source.max(Source::Interpolated))
            }
        }
    }

    /// Seconds of a dense forward product `[m, n, k]` by itself.
    fn dense(&self, at: [f64; 3], dtype: Dtype) -> (f64, Source) {
        if let Some(surface) = &self.dense[dtype_index(dtype)] {
            let (time, source) = surface.time(at);
            return (time, self.at_best(source));
        }
        let [m, n, k] = at;
        (self.roofline.gemm(m, n, k, dtype), Source::Extrapolated)
    }

    /// The least seconds of a product of `flops`.
    fn least(&self, flops: f64, dtype: Dtype, held: Held) -> f64 {
        match held {
            Held::ByItself => 0.0,
            Held::AmongOthers => self.roofline.sustained(flops, dtype),
        }
    }

    /// Seconds of a grouped product.
    pub(super) fn grouped_gemm(&self, op: &Op, held: Held) -> (f64, Source) {
        let &Op::GroupedGemm {
            groups,
            rows,
            n,
            k,
            pass,
            dtype,
        } = op
        else {
            unreachable!("the caller matched a grouped product");
        };
        let groups = groups.max(1) as f64;
        let [rows, n, k] = [rows, n, k].map(|size| size.max(1) as f64);
        let (base, source) = self.grouped_base([groups, rows, n, k], pass, dtype, held);
        let same = |(d, p, _): &&(Dtype, Pass, Surface)| *d == dtype && *p == pass;
        let Some((_, _, surface)) = self.grouped.iter().find(same) else {
            return (base, source.max(Source::Interpolated));
        };
        let (each, measured) = surface.time([rows / groups, n, k]);
        let time = groups * each;
        if groups >= MANY_GROUPS || time >= base {
            (time, self.at_best(measured))
        } else {
            (base, source.max(Source::Interpolated))
        }
    }

    /// A grouped product as one dense product of all rows, padded to tiles, that also reads every
    /// group's weight (or reads and writes its f32 gradient).
    fn grouped_base(
        &self,
        [groups, rows, n, k]: [f64; 4],
        pass: Pass,
        dtype: Dtype,
        held: Held,
    ) -> (f64, Source) {
        let padding = if self.roofline.is_cpu() {
            GROUP_PADDING_OF_CPU
        } else {
            GROUP_PADDING
        };
        let padded = rows + padding * groups;
        // dgrad multiplies by the weight's other side: k columns, n deep.
        let at = if pass == Pass::Dgrad {
            [padded, k, n]
        } else {
            [padded, n, k]
        };
        let (dense, source) = self.dense(at, dtype);
        let compute = dense / (self.derate.at(dtype, pass) * pass_rate(pass));
        let width = dtype.bits() as f64 / 8.0;
        let weights = groups * n * k;
        let bytes = match pass {
            Pass::Wgrad => width * rows * (n + k) + 8.0 * weights,
            _ => width * (rows * k + weights) + width.max(2.0) * rows * n,
        };
        // Rows that are summed over are those of no output, and fill no tiles.
        let [rows, n, k] = match pass {
            Pass::Wgrad => [rows, self.roofline.in_tiles(n), self.roofline.in_tiles(k)],
            Pass::Dgrad => [padded, n, self.roofline.in_tiles(k)],
            Pass::Forward | Pass::Backward => [padded, self.roofline.in_tiles(n), k],
        };
        let least = self.least(2.0 * rows * n * k, dtype, held);
        let time = compute.hypot(self.roofline.stream(bytes)).max(least);
        (time, source)
    }

    /// A table of another device is at best interpolated.
    fn at_best(&self, source: Source) -> Source {
        if self.own {
            source
        } else {
            source.max(Source::Interpolated)
        }
    }

    pub(super) fn roofline(&self) -> &Roofline {
        &self.roofline
    }
}

fn flops([m, n, k]: [u64; 3]) -> f64 {
    2.0 * m as f64 * n as f64 * k as f64
}

/// Whether two descriptions compute alike; their links may differ.
fn same_silicon(a: &Gpu, b: &Gpu) -> bool {
    a.num_sms == b.num_sms
        && a.peak_tflops == b.peak_tflops
        && a.memory_gb_per_s == b.memory_gb_per_s
}

#[cfg(test)]
mod tests {
    #![expect(clippy::print_stdout, reason = "the figures are worth reading")]

    use super::*;

    /// Every (n, k) of the shipped tables in turn is priced from the others. The figures are what the
    /// interpolation is worth between measured widths.
    #[test]
    fn differential_held_out_widths_are_close() {
        for name in ["a100", "h100", "h200", "b200", "b300", "gb200", "gb300"] {
            let gpu = presets::gpu(name).expect("a preset");
            let roofline = Roofline::new(&gpu);
            for dtype in [Dtype::Bf16, Dtype::Fp8] {
                let rows: Vec<_> = table::gemm()
                    .iter()
                    .filter(|row| row.gpu == name && row.dtype == dtype)
                    .map(|row| Point {
                        at: row.shape.map(|size| size as f64),
                        time: flops(row.shape) / (row.tflops * 1e12),
                    })
                    .collect();
                let base = |[m, n, k]: [f64; 3]| roofline.gemm(m, n, k, dtype);
                let mut errors = Vec::new();
                for held in rows.iter().filter(|point| point.at[0] == 1024.0) {
                    let (out, kept): (Vec<Point>, Vec<Point>) =
                        rows.iter().partition(|point| point.at[1..] == held.at[1..]);
                    let surface = Surface::new(&kept, base, SHIPPED, REACH);
                    for point in out {
                        errors.push((surface.time(point.at).0 / point.time).ln().abs());
                    }
                }
                if errors.is_empty() {
                    continue;
                }
                errors.sort_by(f64::total_cmp);
                let at = |q: f64| errors[((errors.len() - 1) as f64 * q) as usize];
                println!("{name} {dtype}: median {:.3}, p90 {:.3}", at(0.5), at(0.9));
                assert!(
                    at(0.5) < 0.09 && at(0.9) < 0.26,
                    "{name} {dtype} {} {}",
                    at(0.5),
                    at(0.9)
                );
            }
        }
    }
}
