//! Scales, ticks, headings and legends: what every plot has in common.

use super::color::Paint;
use super::font::{self, Weight};
use super::scene::{Anchor, Scene};
use crate::format::MOST_DIGITS;

/// Width of every plot, logical pixels.
pub(crate) const WIDTH: f64 = 960.0;
/// Space between the picture's edge and anything in it.
pub(crate) const MARGIN: f64 = 20.0;
/// Size of tick labels and legends.
pub(crate) const SMALL: f64 = 12.0;
/// Size of names.
pub(crate) const BODY: f64 = 13.0;

/// Values along a stretch of pixels, linear or logarithmic.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Scale {
    from: f64,
    to: f64,
    low: f64,
    high: f64,
    log: bool,
}

impl Scale {
    /// `low` at pixel `from`, `high` at pixel `to`. An empty range is widened.
    pub(crate) fn linear((low, high): (f64, f64), (from, to): (f64, f64)) -> Self {
        let high = if high > low {
            high
        } else {
            low + low.abs().max(1.0)
        };
        Self {
            from,
            to,
            low,
            high,
            log: false,
        }
    }

    /// The same with equal ratios at equal distances; both ends positive.
    pub(crate) fn log((low, high): (f64, f64), (from, to): (f64, f64)) -> Self {
        assert!(low > 0.0 && high > 0.0, "a logarithmic scale is positive");
        let high = if high > low { high } else { low * 10.0 };
        Self {
            from,
            to,
            low,
            high,
            log: true,
        }
    }

    /// The pixel of a value.
    pub(crate) fn at(&self, value: f64) -> f64 {
        let share = if self.log {
            (value / self.low).ln() / (self.high / self.low).ln()
        } else {
            (value - self.low) / (self.high - self.low)
        };
        self.from + share * (self.to - self.from)
    }

    /// The value at the end.
    pub(crate) fn high(&self) -> f64 {
        self.high
    }

    /// About `count` round values within, and how they are written.
    pub(crate) fn ticks(&self, count: usize) -> Vec<(f64, String)> {
        if self.log {
            self.log_ticks(count)
        } else {
            self.linear_ticks(count)
        }
    }

    fn linear_ticks(&self, count: usize) -> Vec<(f64, String)> {
        let step = round_step((self.high - self.low) / count.max(1) as f64);
        let decimals = (-step.log10().floor()).clamp(0.0, 9.0) as usize;
        let first = (self.low / step - 1e-9).ceil() as i64;
        let last = (self.high / step + 1e-9).floor() as i64;
        (first..=last)
            .map(|i| {
                let value = i as f64 * step;
                (value, format!("{value:.decimals$}"))
            })
            .collect()
    }

    fn log_ticks(&self, count: usize) -> Vec<(f64, String)> {
        let (first, last) = (
            self.low.log10().floor() as i32,
            self.high.log10().ceil() as i32,
        );
        let candidates = |digits: &[f64], every: usize| {
            let mut ticks = Vec::new();
            for exponent in (first..=last).step_by(every) {
                for digit in digits {
                    let value = digit * 10_f64.powi(exponent);
                    if value >= self.low * 0.999 && value <= self.high * 1.001 {
                        ticks.push((value, written(*digit, exponent)));
                    }
                }
            }
            ticks
        };
        let decades = (last - first) as usize;
        let fine = candidates(&[1.0, 2.0, 5.0], 1);
        let coarse = candidates(&[1.0], decades.div_ceil(count + 2).max(1));
        if fine.len() <= count + 2 || coarse.len() < 2 {
            fine
        } else {
            coarse
        }
    }
}

/// A value of a logarithmic axis: a digit times a power of ten.
fn written(digit: f64, exponent: i32) -> String {
    if exponent.abs() > MOST_DIGITS {
        return format!("{digit}e{exponent}");
    }
    let (value, decimals) = (digit * 10_f64.powi(exponent), (-exponent).max(0) as usize);
    format!("{value:.decimals$}")
}

/// The next of 1, 2, 5 times a power of ten.
fn round_step(step: f64) -> f64 {
    let power = 10_f64.powf(step.log10().floor());
    let digit = step / power;
    let round = match digit {
        d if d <= 1.0 + 1e-9 => 1.0,
        d if d <= 2.0 + 1e-9 => 2.0,
        d if d <= 5.0 + 1e-9 => 5.0,
        _ => 10.0,
    };
    round * power
}

/// The least round value at or above: where an axis that holds `value` may end.
pub(crate) fn round_up(value: f64) -> f64 {
    if value <= 0.0 {
        return 1.0;
    }
    let step = round_step(value / 10.0);
    (value / step - 1e-9).ceil() * step
}

/// Title and subtitle; gives the top of what follows.
pub(crate) fn heading(scene: &mut Scene, title: &str, subtitle: &[String]) -> f64 {
    let room = scene.width - 2.0 * MARGIN;
    let fitted = font::fitted(title, 18.0, Weight::Medium, room);
    scene
        .text((MARGIN, 34.0), fitted, 18.0, Anchor::Start)
        .medium();
    let mut y = 34.0;
    for line in subtitle.iter().flat_map(|text| wrapped(text, BODY, room)) {
        y += 20.0;
        scene
            .text((MARGIN, y), line, BODY, Anchor::Start)
            .paint(Paint::Muted);
    }
    y + 14.0
}

/// A text in lines that fit a width.
fn wrapped(text: &str, size: f64, room: f64) -> Vec<String> {
    let mut lines: Vec<String> = Vec::new();
    for word in text.split_whitespace() {
        match lines.last_mut() {
            Some(line) if font::width(&format!("{line} {word}"), size, Weight::Regular) <= room => {
                line.push(' ');
                line.push_str(word);
            }
            _ => lines.push(font::fitted(word, size, Weight::Regular, room)),
        }
    }
    lines
}

/// How a series is shown in a legend.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Swatch {
    /// A filled square.
    Square,
    /// A line, dashed or not.
    Line {
        /// Dashed.
        dashed: bool,
    },
    /// A mark.
    Mark(super::scene::Form),
}

/// Names beside their colours, in lines that fit; gives the top of what follows.
pub(crate) fn legend(
    scene: &mut Scene,
    (left, top): (f64, f64),
    room: f64,
    entries: &[(Swatch, Paint, String)],
) -> f64 {
    if entries.is_empty() {
        return top;
    }
    let (mut x, mut y) = (left, top + 14.0);
    for (swatch, paint, name) in entries {
        let name = font::fitted(name, SMALL, Weight::Regular, room - 24.0);
        // A viewer's font may be wider than the embedded one.
        let width = 20.0 + 1.08 * font::width(&name, SMALL, Weight::Regular);
        if x > left && x + width > left + room {
            x = left;
            y += 20.0;
        }
        match swatch {
            Swatch::Square => scene.rect((x, y - 10.0), (12.0, 12.0), *paint, None),
            Swatch::Line { dashed: true } => scene.dashed(
                vec![(x - 2.0, y - 4.0), (x + 15.0, y - 4.0)],
                *paint,
                2.0,
                (5.0, 3.0),
            ),
            Swatch::Line { dashed: false } => {
                scene.line(vec![(x - 2.0, y - 4.0), (x + 15.0, y - 4.0)], *paint, 2.5);
            }
            Swatch::Mark(form) => scene.mark((x + 6.0, y - 4.0), 5.5, *form, *paint, None),
        }
        scene.text((x + 19.0, y), name, SMALL, Anchor::Start);
        x += width + 18.0;
    }
    y + 14.0
}

/// The rectangle that data is drawn in.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Frame {
    pub(crate) left: f64,
    pub(crate) right: f64,
    pub(crate) top: f64,
    pub(crate) bottom: f64,
}

impl Frame {
    /// Pixels of an axis from left to right.
    pub(crate) fn across(&self) -> (f64, f64) {
        (self.left, self.right)
    }

    /// Pixels of an axis from bottom to top.
    pub(crate) fn upwards(&self) -> (f64, f64) {
        (self.bottom, self.top)
    }

    /// Vertical grid lines with labels below and the name of the axis.
    pub(crate) fn x_axis(&self, scene: &mut Scene, scale: &Scale, name: &str) {
        for (value, label) in scale.ticks(8) {
            let x = scale.at(value);
            scene.line(vec![(x, self.top), (x, self.bottom)], Paint::Grid, 1.0);
            scene
                .text((x, self.bottom + 17.0), label, SMALL, Anchor::Middle)
                .paint(Paint::Muted);
        }
        let middle = f64::midpoint(self.left, self.right);
        scene.text((middle, self.bottom + 38.0), name, BODY, Anchor::Middle);
    }

    /// Vertical grid lines at whole values, with labels below: the fractions of a short axis have none.
    pub(crate) fn whole_ticks(&self, scene: &mut Scene, scale: &Scale) {
        for (value, label) in scale.ticks(10) {
            if value.fract().abs() < 1e-9 {
                let label = label.split('.').next().unwrap_or_default().to_owned();
                let x = scale.at(value);
                scene.line(vec![(x, self.top), (x, self.bottom)], Paint::Grid, 1.0);
                scene
                    .text((x, self.bottom + 17.0), label, SMALL, Anchor::Middle)
                    .paint(Paint::Muted);
            }
        }
    }

    /// Horizontal grid lines with labels to the left and the name of the axis, reading upwards.
    pub(crate) fn y_axis(&self, scene: &mut Scene, scale: &Scale, name: &str) {
        let mut widest = 0.0_f64;
        for (value, label) in scale.ticks(6) {
            let y = scale.at(value);
            widest = widest.max(font::width(&label, SMALL, Weight::Regular));
            scene.line(vec![(self.left, y), (self.right, y)], Paint::Grid, 1.0);
            scene
                .text((self.left - 8.0, y + 4.0), label, SMALL, Anchor::End)
                .paint(Paint::Muted);
        }
        let middle = f64::midpoint(self.top, self.bottom);
        scene
            .text(
                (self.left - widest - 20.0, middle),
                name,
                BODY,
                Anchor::Middle,
            )
            .upwards();
    }
}

/// Height of an x axis with its labels and name.
pub(crate) const X_AXIS_HEIGHT: f64 = 50.0;

#[cfg(test)]
mod tests {
    use super::*;

    fn labels(scale: &Scale, count: usize) -> String {
        let ticks = scale.ticks(count);
        ticks
            .iter()
            .map(|(_, label)| label.as_str())
            .collect::<Vec<_>>()
            .join(" ")
    }

    #[test]
    fn golden_ticks() {
        let linear = |low, high| Scale::linear((low, high), (0.0, 100.0));
        assert_eq!(labels(&linear(0.0, 1.0), 5), "0.0 0.2 0.4 0.6 0.8 1.0");
        assert_eq!(labels(&linear(0.0, 83.0), 6), "0 20 40 60 80");
        assert_eq!(labels(&linear(9.1, 10.4), 5), "9.5 10.0");
        let log = |low, high| Scale::log((low, high), (0.0, 100.0));
        assert_eq!(labels(&log(0.5, 20.0), 6), "0.5 1 2 5 10 20");
        assert_eq!(labels(&log(0.01, 1e4), 6), "0.01 0.1 1 10 100 1000 10000");
        let wide = "1e-150 1e-100 1e-50 1 1e50 1e100 1e150";
        assert_eq!(labels(&log(1e-150, 1e150), 4), wide);
    }

    #[test]
    fn law_scales_hit_both_ends() {
        for scale in [
            Scale::linear((2.0, 6.0), (10.0, 90.0)),
            Scale::log((2.0, 6.0), (10.0, 90.0)),
        ] {
            assert!((scale.at(2.0) - 10.0).abs() < 1e-9);
            assert!((scale.at(6.0) - 90.0).abs() < 1e-9);
        }
    }

    #[test]
    fn an_empty_range_is_widened() {
        assert!(Scale::linear((5.0, 5.0), (0.0, 1.0)).at(5.0).is_finite());
        assert!(Scale::log((5.0, 5.0), (0.0, 1.0)).at(5.0).is_finite());
        assert_eq!(round_up(0.0), 1.0);
        assert!((round_up(0.37) - 0.4).abs() < 1e-12);
        assert_eq!(round_up(83.0), 90.0);
    }

    #[test]
    fn law_legends_stay_inside() {
        let mut scene = Scene::new(200.0, "");
        let entries: Vec<(Swatch, Paint, String)> = (0..9)
            .map(|i| (Swatch::Square, Paint::Ink, format!("series number {i}")))
            .collect();
        let bottom = legend(&mut scene, (10.0, 0.0), 180.0, &entries);
        assert!(bottom > 100.0, "wraps: {bottom}");
        for shape in &scene.shapes {
            if let super::super::scene::Shape::Text(text) = shape {
                assert!(text.x + font::width(&text.words, text.size, text.weight) <= 190.0);
            }
        }
    }
}
