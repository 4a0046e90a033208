//! [`Surface`]: time of an op family over three sizes, exact at what was measured, monotone
//! everywhere.
//!
//! Interpolation is of utilisation, not of time. What a measurement lends its neighbours is the ratio of
//! its time to that of a base formula (a roofline with an efficiency). A shape twice as large is then still
//! about twice as slow. The ratio at a point is the mean of the measured ratios weighted
//! by inverse distance in log sizes, shrunk towards 1 far from all of them (Shepard 1968; interpolating
//! efficiency rather than latency is aiconfigurator's lesson).
//!
//! Such a mean alone is not monotone, and measurements are not either (a shape 4% larger can be 6%
//! faster). The mean is therefore tabulated on a grid whose axes contain every measured size. Measured
//! values are put in their places. The grid is then repaired, so that no point is cheaper than a smaller
//! one. Reading it is multilinear in the logarithms of size and time, which keeps the order.

use crate::cost::Source;

/// Softening of distances, chosen together with [`SHIPPED`] by holding out one (n, k) at a time
/// of the shipped GEMM tables.
const SOFTENING: f64 = 0.05;

/// How measurements are laid over a base formula.
#[derive(Debug, Clone, Copy)]
pub(super) struct Laid {
    /// Weight of the formula among them.
    trust: f64,
    /// Grid lines between measured sizes and beyond them are at most this far apart, as a ratio.
    step: f64,
}

/// Those of others, whose base is fitted to such tables.
pub(super) const SHIPPED: Laid = Laid {
    trust: 0.3,
    step: 4.0,
};

/// Those made here, next to which the formula has no weight, since what the machine at hand does to one shape it does to
/// others more likely than what a formula says. They are few, and what is asked for lies further from them: the straight lines
/// of a coarser grid are up to a twentieth above a formula with a fixed part.
pub(super) const LOCAL: Laid = Laid {
    trust: 1e-4,
    step: 2.0,
};

/// A measurement.
#[derive(Debug, Clone, Copy)]
pub(super) struct Point {
    /// Three sizes of at least 1.
    pub(super) at: [f64; 3],
    /// Seconds.
    pub(super) time: f64,
}

/// Time over three sizes.
#[derive(Debug, Clone)]
pub(super) struct Surface {
    /// Logarithms of the grid lines, ascending.
    axes: [Vec<f64>; 3],
    /// Logarithm of the time at every grid point, the last axis fastest.
    times: Vec<f64>,
    /// Grid points that are measurements.
    measured: Vec<bool>,
    /// Logarithms of the least and largest measured size.
    hull: [[f64; 2]; 3],
}

impl Surface {
    /// Tabulates `base`, which must grow with every size, corrected by `points`. `reach` bounds the sizes that are
    /// tabulated; beyond it time grows in proportion.
    pub(super) fn new(
        points: &[Point],
        base: impl Fn([f64; 3]) -> f64,
        laid: Laid,
        reach: [[f64; 2]; 3],
    ) -> Self {
        assert!(!points.is_empty(), "a surface passes through something");
        let axes = [0, 1, 2].map(|axis| {
            let sizes = points.iter().map(|point| point.at[axis]);
            grid_lines(sizes.collect(), reach[axis], laid.step)
        });
        let hull = [0, 1, 2].map(|axis| {
            let logs = points.iter().map(|point| point.at[axis].ln());
            [
                logs.clone().fold(f64::INFINITY, f64::min),
                logs.fold(f64::NEG_INFINITY, f64::max),
            ]
        });
        let len = axes.iter().map(Vec::len).product();
        let times = tabulate(&axes, points, base, laid.trust);
        let mut surface = Self {
            measured: vec![false; len],
            axes,
            times,
            hull,
        };
        surface.place(points);
        surface
    }

    /// Puts measurements in their places and repairs the order around them.
    fn place(&mut self, points: &[Point]) {
        let mut fixed: Vec<([usize; 3], f64)> = points
            .iter()
            .map(|point| {
                let cell = [0, 1, 2].map(|axis| {
                    let log = point.at[axis].ln();
                    self.axes[axis].partition_point(|&line| line < log - 1e-12)
                });
                (cell, point.time.ln())
            })
            .collect();
        // A measurement that is cheaper than a smaller one is raised to it.
        fixed.sort_by_key(|(cell, _)| *cell);
        let below = |a: &[usize; 3], b: &[usize; 3]| (0..3).all(|axis| a[axis] <= b[axis]);
        for i in 0..fixed.len() {
            let floor = fixed[..i]
                .iter()
                .filter(|(cell, _)| below(cell, &fixed[i].0));
            let floor = floor
                .map(|&(_, time)| time)
                .fold(f64::NEG_INFINITY, f64::max);
            if floor > fixed[i].1 {
                fixed[i].1 = floor;
            } else {
                let index = self.index(fixed[i].0);
                self.measured[index] = true;
            }
        }
        // No grid point may be dearer than a measurement above it: a running minimum from the top.
        let mut ceiling = vec![f64::INFINITY; self.times.len()];
        for &(cell, time) in &fixed {
            let index = self.index(cell);
            ceiling[index] = time;
            self.times[index] = time;
        }
        self.sweep(&mut ceiling, true);
        for (time, ceiling) in self.times.iter_mut().zip(ceiling) {
            *time = time.min(ceiling);
        }
        // And none cheaper than a smaller one: a running maximum from the bottom. It moves no
        // measurement, since all that is below one is bounded by it.
        let mut times = std::mem::take(&mut self.times);
        self.sweep(&mut times, false);
        self.times = times;
    }

    /// Along every axis, each value becomes the least of itself and those above (`down`), or the
    /// greatest of itself and those below.
    fn sweep(&self, values: &mut [f64], down: bool) {
        let strides = [
            self.axes[1].len() * self.axes[2].len(),
            self.axes[2].len(),
            1,
        ];
        for (stride, lines) in strides.into_iter().zip(&self.axes) {
            let len = lines.len();
            let has_smaller = |index: usize| !(index / stride).is_multiple_of(len);
            if down {
                for index in (0..values.len()).rev().filter(|&index| has_smaller(index)) {
                    values[index - stride] = values[index - stride].min(values[index]);
                }
            } else {
                for index in (0..values.len()).filter(|&index| has_smaller(index)) {
                    values[index] = values[index].max(values[index - stride]);
                }
            }
        }
    }

    fn index(&self, cell: [usize; 3]) -> usize {
        (cell[0] * self.axes[1].len() + cell[1]) * self.axes[2].len() + cell[2]
    }

    /// Seconds at three sizes of at least 1, and how they are known.
    pub(super) fn time(&self, at: [f64; 3]) -> (f64, Source) {
        let mut low = [0; 3];
        let mut fraction = [0.0; 3];
        let mut beyond = 0.0;
        let mut inside = true;
        for axis in 0..3 {
            let lines = &self.axes[axis];
            let log = at[axis].max(1.0).ln();
            inside &= (self.hull[axis][0] - 1e-9..=self.hull[axis][1] + 1e-9).contains(&log);
            let last = lines.len() - 1;
            // Beyond the last line time grows in proportion; below the first it stays.
            beyond += (log - lines[last]).max(0.0);
            let log = log.clamp(lines[0], lines[last]);
            let above = lines.partition_point(|&line| line <= log + 1e-12);
            low[axis] = above.saturating_sub(1);
            if low[axis] < last {
                let (a, b) = (lines[low[axis]], lines[low[axis] + 1]);
                // The tolerance that finds an exact line must not leave a hair of its neighbour.
                let part = (log - a) / (b - a);
                fraction[axis] = if part < 1e-9 { 0.0 } else { part };
            }
        }
        let mut time = 0.0;
        for corner in 0..8_usize {
            let mut weight = 1.0;
            let mut cell = low;
            for axis in 0..3 {
                if corner >> axis & 1 == 1 {
                    weight *= fraction[axis];
                    cell[axis] += 1;
                } else {
                    weight *= 1.0 - fraction[axis];
                }
            }
            if weight > 0.0 {
                time += weight * self.times[self.index(cell)];
            }
        }
        let exact = fraction == [0.0; 3] && beyond == 0.0 && self.measured[self.index(low)];
        let source = match (exact, inside) {
            (true, _) => Source::Measured,
            (false, true) => Source::Interpolated,
            (false, false) => Source::Extrapolated,
        };
        ((time + beyond).exp(), source)
    }
}

/// Log times at every grid point: the base, times the mean of the measured ratios by inverse squared
/// distance with the base's 1 among them.
fn tabulate(
    axes: &[Vec<f64>; 3],
    points: &[Point],
    base: impl Fn([f64; 3]) -> f64,
    trust: f64,
) -> Vec<f64> {
    let ratios: Vec<f64> = points
        .iter()
        .map(|point| (point.time / base(point.at)).ln())
        .collect();
    // Squared distance of every point from every line of an axis: lines by points.
    let squares = [0, 1, 2].map(|axis| {
        let from = |line: f64| {
            points
                .iter()
                .map(move |point| (point.at[axis].ln() - line).powi(2))
        };
        axes[axis]
            .iter()
            .map(|&line| from(line).collect())
            .collect::<Vec<Vec<f64>>>()
    });
    let mut times = Vec::with_capacity(axes.iter().map(Vec::len).product());
    let mut plane = vec![0.0; points.len()];
    for (x, from_x) in axes[0].iter().zip(&squares[0]) {
        for (y, from_y) in axes[1].iter().zip(&squares[1]) {
            for (sum, (a, b)) in plane.iter_mut().zip(from_x.iter().zip(from_y)) {
                *sum = a + b + SOFTENING;
            }
            for (z, from_z) in axes[2].iter().zip(&squares[2]) {
                let (mut sum, mut weights) = (0.0, trust);
                for ((near, far), ratio) in plane.iter().zip(from_z).zip(&ratios) {
                    let distance = near + far;
                    let weight = 1.0 / (distance * distance);
                    sum += weight * ratio;
                    weights += weight;
                }
                times.push(base([x.exp(), y.exp(), z.exp()]).ln() + sum / weights);
            }
        }
    }
    times
}

/// Logarithms of the distinct sizes within and between them, and out to `reach`.
fn grid_lines(mut sizes: Vec<f64>, reach: [f64; 2], step: f64) -> Vec<f64> {
    sizes.retain(|size| *size >= 1.0);
    sizes.push(reach[0]);
    sizes.push(reach[1]);
    sizes.sort_by(f64::total_cmp);
    sizes.dedup();
    let mut lines: Vec<f64> = Vec::new();
    for log in sizes.into_iter().map(f64::ln) {
        if let Some(&last) = lines.last() {
            let pieces = ((log - last) / step.ln()).ceil().max(1.0);
            for piece in 1..pieces as usize {
                lines.push(last + (log - last) * piece as f64 / pieces);
            }
        }
        lines.push(log);
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::*;

    const REACH: [[f64; 2]; 3] = [[1.0, 65536.0]; 3];

    fn base(at: [f64; 3]) -> f64 {
        1e-6 + at[0] * at[1] * at[2] * 1e-12
    }

    fn points() -> Vec<Point> {
        // The last is cheaper than the one before it, which is smaller.
        [
            ([64.0, 64.0, 64.0], 2e-6),
            ([128.0, 64.0, 64.0], 3e-6),
            ([100.0, 512.0, 700.0], 50e-6),
            ([100.0, 512.0, 701.0], 49e-6),
        ]
        .map(|(at, time)| Point { at, time })
        .to_vec()
    }

    #[test]
    fn law_measured_points_are_exact_and_say_so() {
        let surface = Surface::new(&points(), base, SHIPPED, REACH);
        for point in &points()[..3] {
            let (time, source) = surface.time(point.at);
            assert!(
                (time / point.time - 1.0).abs() < 1e-9,
                "{time} at {:?}",
                point.at
            );
            assert_eq!(source, Source::Measured);
        }
        let (raised, source) = surface.time([100.0, 512.0, 701.0]);
        assert!((raised / 50e-6 - 1.0).abs() < 1e-9);
        assert_eq!(source, Source::Interpolated);
        assert_eq!(surface.time([99.0, 100.0, 100.0]).1, Source::Interpolated);
        assert_eq!(surface.time([99.0, 100.0, 10.0]).1, Source::Extrapolated);
    }

    #[test]
    fn law_more_is_never_cheaper() {
        let surface = Surface::new(&points(), base, SHIPPED, REACH);
        let sizes = [
            1.0, 3.0, 64.0, 65.0, 100.0, 128.0, 512.0, 701.0, 9000.0, 65536.0, 1e6,
        ];
        for a in sizes {
            for b in sizes {
                let mut last = [0.0; 3];
                for c in sizes {
                    for (axis, at) in [[c, a, b], [a, c, b], [a, b, c]].into_iter().enumerate() {
                        let (time, _) = surface.time(at);
                        assert!(time.is_finite() && time > 0.0);
                        assert!(time >= last[axis] * (1.0 - 1e-12), "{at:?}");
                        last[axis] = time;
                    }
                }
            }
        }
    }

    #[test]
    fn far_from_measurements_the_base_returns() {
        let surface = Surface::new(&points(), base, SHIPPED, REACH);
        let far = [60000.0, 60000.0, 60000.0];
        let ratio = surface.time(far).0 / base(far);
        assert!((0.5..2.0).contains(&ratio), "{ratio}");
    }
}
