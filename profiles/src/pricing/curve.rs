//! [`Curve`]: a positive quantity over one size, through measured points, monotone.

/// Interpolation through points; outside them the slope given at construction continues.
#[derive(Debug, Clone)]
pub(super) struct Curve {
    /// Logarithms of size and value, ascending in both.
    points: Vec<[f64; 2]>,
    slopes: Slopes,
}

/// How a curve goes on, and what is straight between its points.
#[derive(Debug, Clone, Copy)]
enum Slopes {
    /// Logarithms of both. d ln(value) / d ln(size) below the first and above the last point.
    Powers([f64; 2]),
    /// The value itself. It stays what it is below the first point, and grows by so much a unit of size above the last.
    Lines(f64),
}

impl Curve {
    /// A curve that never falls: a point below a smaller one's value is raised to it.
    pub(super) fn rising(points: impl IntoIterator<Item = (f64, f64)>, slopes: [f64; 2]) -> Self {
        Self::new(points, Slopes::Powers(slopes))
    }

    /// The same of lines: a fixed part and one that grows with size, as between points that are far apart. `beyond` is the value
    /// of a unit of size above the last point.
    pub(super) fn lines(points: impl IntoIterator<Item = (f64, f64)>, beyond: f64) -> Self {
        Self::new(points, Slopes::Lines(beyond))
    }

    fn new(points: impl IntoIterator<Item = (f64, f64)>, slopes: Slopes) -> Self {
        let mut points: Vec<[f64; 2]> = points
            .into_iter()
            .map(|(size, value)| [size.ln(), value.ln()])
            .collect();
        assert!(!points.is_empty(), "a curve passes through something");
        points.sort_by(|a, b| a[0].total_cmp(&b[0]).then(a[1].total_cmp(&b[1])));
        points.dedup_by(|later, kept| {
            let same = later[0] - kept[0] < 1e-12;
            if same {
                kept[1] = kept[1].max(later[1]);
            }
            same
        });
        for i in 1..points.len() {
            points[i][1] = points[i][1].max(points[i - 1][1]);
        }
        Self { points, slopes }
    }

    /// The value at a size above 0.
    pub(super) fn at(&self, size: f64) -> f64 {
        let log = size.ln();
        let above = self.points.partition_point(|point| point[0] <= log);
        let (before, after) = (above.checked_sub(1), self.points.get(above));
        let before = before.map(|before| self.points[before]);
        let straight =
            |[a, b]: [[f64; 2]; 2], at: f64| a[1] + (b[1] - a[1]) * (at - a[0]) / (b[0] - a[0]);
        match (self.slopes, before, after) {
            (_, None, None) => unreachable!("a curve has a point"),
            (Slopes::Powers([slope, _]), None, Some(&of))
            | (Slopes::Powers([_, slope]), Some(of), None) => (of[1] + slope * (log - of[0])).exp(),
            (Slopes::Powers(_), Some(a), Some(&b)) => straight([a, b], log).exp(),
            (Slopes::Lines(_), None, Some(first)) => first[1].exp(),
            (Slopes::Lines(slope), Some(last), None) => {
                last[1].exp() + slope * (size - last[0].exp())
            }
            (Slopes::Lines(_), Some(a), Some(b)) => {
                straight([a, *b].map(|point| point.map(f64::exp)), size)
            }
        }
    }

    /// Whether a size lies between the first and the last point.
    pub(super) fn covers(&self, size: f64) -> bool {
        let log = size.ln();
        let (first, last) = (self.points[0][0], self.points[self.points.len() - 1][0]);
        (first - 1e-9..=last + 1e-9).contains(&log)
    }

    /// Whether a size is one of the points.
    pub(super) fn is_point(&self, size: f64) -> bool {
        let log = size.ln();
        self.points
            .iter()
            .any(|point| (point[0] - log).abs() < 1e-9)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn golden_powers_are_straight() {
        let curve = Curve::rising([(1.0, 2.0), (100.0, 200.0)], [0.0, 1.0]);
        assert!((curve.at(10.0) - 20.0).abs() < 1e-9);
        assert!((curve.at(0.1) - 2.0).abs() < 1e-9);
        assert!((curve.at(1000.0) - 2000.0).abs() < 1e-6);
        assert!(curve.covers(100.0) && !curve.covers(101.0));
        assert!(curve.is_point(100.0) && !curve.is_point(10.0));
    }

    #[test]
    fn golden_lines_have_a_fixed_part() {
        let curve = Curve::lines([(100.0, 12.0), (1000.0, 30.0)], 0.1);
        for (size, value) in [
            (1.0, 12.0),
            (100.0, 12.0),
            (550.0, 21.0),
            (1000.0, 30.0),
            (1100.0, 40.0),
        ] {
            let found = curve.at(size);
            assert!((found - value).abs() < 1e-9, "{size}: {found}");
        }
    }

    #[test]
    fn law_it_never_falls() {
        let points = [(1.0, 5.0), (2.0, 3.0), (4.0, 9.0)];
        for curve in [Curve::rising(points, [0.0, 1.0]), Curve::lines(points, 0.0)] {
            let values: Vec<f64> = (1..200).map(|i| curve.at(f64::from(i) * 0.03)).collect();
            assert!(values.windows(2).all(|pair| pair[0] <= pair[1] + 1e-12));
            assert!((curve.at(2.0) - 5.0).abs() < 1e-12);
        }
    }
}
