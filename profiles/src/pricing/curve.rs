//! [`Curve`]: a positive quantity over one size, through measured points, monotone.

/// Log-log interpolation through points; outside them the slope given at construction continues.
#[derive(Debug, Clone)]
pub(super) struct Curve {
    /// Logarithms of size and value, ascending in both.
    points: Vec<[f64; 2]>,
    /// d ln(value) / d ln(size) below the first and above the last point.
    slopes: [f64; 2],
}

impl Curve {
    /// A curve that never falls: a point below a smaller one's value is raised to it.
    pub(super) fn rising(points: impl IntoIterator<Item = (f64, f64)>, slopes: [f64; 2]) -> Self {
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
        let value = if above == 0 {
            let first = self.points[0];
            first[1] + self.slopes[0] * (log - first[0])
        } else if above == self.points.len() {
            let last = self.points[above - 1];
            last[1] + self.slopes[1] * (log - last[0])
        } else {
            let (a, b) = (self.points[above - 1], self.points[above]);
            a[1] + (b[1] - a[1]) * (log - a[0]) / (b[0] - a[0])
        };
        value.exp()
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
    fn law_it_never_falls() {
        let curve = Curve::rising([(1.0, 5.0), (2.0, 3.0), (4.0, 9.0)], [0.0, 1.0]);
        let values: Vec<f64> = (1..200).map(|i| curve.at(f64::from(i) * 0.03)).collect();
        assert!(values.windows(2).all(|pair| pair[0] <= pair[1]));
        assert!((curve.at(2.0) - 5.0).abs() < 1e-12);
    }
}
