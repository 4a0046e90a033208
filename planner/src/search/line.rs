//! [`Line`].

/// A linear function of one number, by what it is at none and how much more for each.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(super) struct Line {
    pub(super) at_none: f64,
    pub(super) slope: f64,
}

impl Line {
    pub(super) fn at(&self, place: f64) -> f64 {
        self.at_none + self.slope * place
    }

    /// The line through two points; level where they are one.
    pub(super) fn through([from, low]: [f64; 2], [to, high]: [f64; 2]) -> Self {
        let slope = if to > from {
            (high - low) / (to - from)
        } else {
            0.0
        };
        Self {
            at_none: low - slope * from,
            slope,
        }
    }

    /// Of the lines that are above none of some points, which are in order, the one that is the highest at a place between them.
    pub(super) fn below(points: &[[f64; 2]], place: f64) -> Self {
        let mut hull: Vec<[f64; 2]> = Vec::new();
        for &point in points {
            while let [.., before, last] = hull[..]
                && Self::through(before, point).at(last[0]) <= last[1]
            {
                hull.pop();
            }
            hull.push(point);
        }
        let last = hull.len() - 1;
        let after = hull.iter().position(|[at, _]| *at > place);
        let after = after.unwrap_or(last).clamp(1.min(last), last);
        Self::through(hull[after.saturating_sub(1)], hull[after])
    }
}
