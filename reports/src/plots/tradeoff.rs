//! Speed against memory of all layouts that fit, with the Pareto front of those priced: what another
//! GiB buys. A search for speed prices what may be fast; the rest is shaded by a survey that gives
//! each layout one look, at its memory and the speed that it cannot exceed.

use moefold_planner::answer::{Survey, SurveyCell};
use moefold_profiles::statistics::unbeaten;

use super::Plot;
use crate::draw::axis::{self, BODY, Frame, MARGIN, SMALL, Scale, Swatch, WIDTH, X_AXIS_HEIGHT};
use crate::draw::color::{MEASURED, PREDICTED, Paint};
use crate::draw::font::{self, Weight};
use crate::draw::scene::{Anchor, Form, Scene};
use crate::format::{self, MemoryUnit};
use crate::subject::{Comparison, Surveyed};

/// Height of the data part.
const HEIGHT: f64 = 380.0;
/// Fewest points that make a picture.
const FEWEST: usize = 3;
/// Capacity over the largest use at which it is still drawn to scale.
const CAPACITY_ROOM: f64 = 2.0;

/// Shades of a cell by how many layouts it holds, from this many on.
const SHADES: [(u32, u32); 4] = [
    (1, 0xe3_e8_f4),
    (3, 0xc9_d3_ea),
    (10, 0xa6_b6_dc),
    (30, 0x7f_95_c9),
];

/// A layout as a point.
#[derive(Debug, Clone, PartialEq)]
struct Point {
    gib: f64,
    speed: f64,
    name: String,
    details: String,
    kind: Kind,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Considered,
    Predicted,
    Measured,
}

/// The plot; absent with fewer than three points, or where they do different work.
pub(crate) fn plot(comparison: &Comparison) -> Option<Plot> {
    let points = points(comparison);
    if points.len() < FEWEST || !comparison.is_comparable() {
        return None;
    }
    let predicted: Vec<&Point> = points.iter().filter(|p| p.kind != Kind::Measured).collect();
    let front = pareto(&predicted);
    let largest = points.iter().map(|p| p.gib).fold(0.0, f64::max);
    let unit = MemoryUnit::for_largest(largest);
    let capacity = comparison
        .subjects
        .iter()
        .filter_map(|s| s.setting.capacity_gib())
        .reduce(f64::max)
        .filter(|&c| c >= largest && c <= CAPACITY_ROOM * largest);
    let mut scene = Scene::new(WIDTH, "Speed against memory");
    let prices = comparison.best_prices();
    let surveyed = comparison.surveys.iter().find(|s| s.profiles == prices);
    let mut subtitle = subtitle(surveyed.map(|s| &s.survey), &points, predicted.len());
    if comparison.subjects.iter().any(|s| s.profiles != prices) {
        let names: Vec<&str> = prices.iter().map(|p| p.name.as_str()).collect();
        subtitle.push(format!(
            "Predictions priced with {}; those from other prices are left out.",
            if names.is_empty() {
                "the shipped tables".to_owned()
            } else {
                format!("profile “{}”", names.join("”, “"))
            }
        ));
    }
    let top = axis::heading(&mut scene, "Speed against memory", &subtitle);
    let mut entries = legend(&points, !front.is_empty(), capacity.is_some());
    if surveyed.is_some() {
        let words = "all that fit, at most so fast (darker: more)".to_owned();
        let (_, shade) = SHADES[2];
        entries.insert(0, (Swatch::Square, Paint::Rgb(shade), words));
    }
    let top = axis::legend(&mut scene, (MARGIN, top), WIDTH - 2.0 * MARGIN, &entries);
    let frame = Frame {
        left: MARGIN + 70.0,
        right: WIDTH - MARGIN - 10.0,
        top: top + 12.0,
        bottom: top + 12.0 + HEIGHT,
    };
    let cells: Vec<Cell> = surveyed.map(cells).unwrap_or_default();
    let x_values = points.iter().map(|p| p.gib).chain(capacity);
    let x_values = x_values.chain(cells.iter().flat_map(|cell| [cell.gib.0, cell.gib.1]));
    let (low, high) = padded(x_values.map(|gib| gib * unit.per_gib()));
    let x = Scale::linear((low, high), frame.across());
    let y_values = points.iter().map(|p| p.speed);
    let y_values = y_values.chain(cells.iter().flat_map(|cell| [cell.speed.0, cell.speed.1]));
    let (low, high) = padded(y_values);
    let y = Scale::linear((low, high), frame.upwards());
    let at = |gib: f64, speed: f64| (x.at(gib * unit.per_gib()), y.at(speed));
    let place = |p: &Point| at(p.gib, p.speed);
    frame.x_axis(
        &mut scene,
        &x,
        &format!("peak memory of the fullest rank ({})", unit.name()),
    );
    let rank = comparison.rank_word();
    frame.y_axis(&mut scene, &y, &format!("tokens per second per {rank}"));
    for cell in &cells {
        let (left, bottom) = at(cell.gib.0, cell.speed.0);
        let (right, top) = at(cell.gib.1, cell.speed.1);
        let size = (right - left, bottom - top);
        scene.rect((left, top), size, cell.paint(), Some(cell.tip()));
    }
    if let Some(capacity) = capacity {
        let x = x.at(capacity * unit.per_gib());
        let ends = vec![(x, frame.top), (x, frame.bottom)];
        scene.dashed(ends, Paint::Limit, 2.0, (6.0, 3.0));
    }
    for kind in [Kind::Considered, Kind::Predicted, Kind::Measured] {
        for point in points.iter().filter(|p| p.kind == kind) {
            let (radius, form, paint) = kind.mark();
            scene.mark(place(point), radius, form, paint, Some(tip(point)));
        }
    }
    scene.line(staircase(front.iter().map(|p| place(p))), Paint::Ink, 1.5);
    for point in &front {
        scene.mark(place(point), 3.5, Form::Disc, Paint::Ink, Some(tip(point)));
    }
    if let Some(winner) = front.last() {
        label_winner(&mut scene, &frame, place(winner), winner, rank);
    }
    scene.height = frame.bottom + X_AXIS_HEIGHT;
    Some(Plot {
        stem: "speed-memory".to_owned(),
        caption: caption(surveyed.is_some()).to_owned(),
        scene,
    })
}

/// What to look at.
fn caption(surveyed: bool) -> &'static str {
    if surveyed {
        "Of the layouts priced, only those on the line are worth choosing: for every other one, some \
         layout is both faster and smaller. Where shading reaches past the line to the left, smaller \
         layouts fit that were not priced: planning with --front prices the best of them."
    } else {
        "Of the layouts priced, only those on the line are worth choosing: for every other one, some \
         layout is both faster and smaller. Smaller ones than these may exist: planning with --front \
         prices the best of them."
    }
}

/// What the picture shows, in one or two sentences.
fn subtitle(survey: Option<&Survey>, points: &[Point], predicted: usize) -> Vec<String> {
    let priced = format::grouped(predicted as u64);
    let Some(survey) = survey else {
        let mut subtitle = vec![format!(
            "{priced} plans that were priced and fit; up is faster, left is smaller."
        )];
        if points.iter().any(|p| p.kind == Kind::Considered) {
            subtitle.push("The search priced only what its bounds let be the fastest.".to_owned());
        }
        return subtitle;
    };
    vec![
        format!(
            "Shaded: all {} layouts that fit, of {} legal ones worth trying; up is faster, left is \
             smaller.",
            format::grouped(survey.fitting),
            format::grouped(survey.layouts)
        ),
        format!(
            "Each is counted once, at its fastest recompute set that fits and the speed a bound lets \
             it have. Points: {priced} plans priced in full."
        ),
    ]
}

/// A cell of the survey's grid, in GiB and tokens per second.
struct Cell {
    gib: (f64, f64),
    speed: (f64, f64),
    layouts: u32,
}

fn cells(surveyed: &Surveyed) -> Vec<Cell> {
    let Surveyed {
        survey, fastest, ..
    } = surveyed;
    let edges = |cell: u32, whole: f64| {
        let edge = |cell: u32| whole * f64::from(cell) / f64::from(Survey::CELLS);
        (edge(cell), edge(cell + 1))
    };
    let cell = |&SurveyCell(column, row, layouts): &SurveyCell| Cell {
        gib: edges(column, survey.capacity_gib),
        speed: edges(row, *fastest),
        layouts,
    };
    survey.cells.iter().map(cell).collect()
}

impl Cell {
    fn paint(&self) -> Paint {
        let reached = SHADES.iter().rev().find(|(from, _)| self.layouts >= *from);
        Paint::Rgb(reached.unwrap_or(&SHADES[0]).1)
    }

    fn tip(&self) -> String {
        format!(
            "layouts that fit in {1} to {2}, at most {3} to {4} tokens/s each: {0}",
            format::grouped(self.layouts.into()),
            format::gib(self.gib.0),
            format::gib(self.gib.1),
            format::short_count(self.speed.0),
            format::short_count(self.speed.1)
        )
    }
}

impl Kind {
    fn mark(self) -> (f64, Form, Paint) {
        match self {
            Self::Considered => (3.0, Form::Disc, Paint::Rgb(0x6a_73_82)),
            Self::Predicted => (5.0, Form::Disc, PREDICTED),
            Self::Measured => (7.0, Form::Diamond, MEASURED),
        }
    }
}

fn points(comparison: &Comparison) -> Vec<Point> {
    let prices = comparison.best_prices();
    let mut points: Vec<Point> = comparison
        .considered
        .iter()
        .filter(|c| c.profiles == prices)
        .map(|c| Point {
            gib: c.peak_gib,
            speed: c.tokens_per_s_per_gpu,
            name: c.layout.clone(),
            details: c.details.clone(),
            kind: Kind::Considered,
        })
        .collect();
    for subject in &comparison.subjects {
        let name = format!("{} ({})", subject.name, subject.layout);
        if subject.profiles == prices {
            points.push(Point {
                gib: subject.planned.predicted.peak_gib,
                speed: subject.planned.predicted.tokens_per_s_per_gpu,
                name: name.clone(),
                details: subject.details.clone(),
                kind: Kind::Predicted,
            });
        }
        if let Some(gib) = subject.measured_peak_gib() {
            points.push(Point {
                gib,
                speed: subject.tokens_per_s_per_gpu(),
                name,
                details: subject.details.clone(),
                kind: Kind::Measured,
            });
        }
    }
    points.retain(|p| p.gib.is_finite() && p.speed.is_finite());
    points
}

/// The points that no other beats in both, from the smallest to the fastest.
fn pareto<'a>(points: &[&'a Point]) -> Vec<&'a Point> {
    let mut points = points.to_vec();
    // Of equals, the one that is compared stands for them.
    points.sort_by_key(|point| point.kind == Kind::Considered);
    unbeaten(points, |point| [point.gib, -point.speed])
}

/// A line that rises only where a point is: between two sizes the smaller layout is what there is.
fn staircase(points: impl Iterator<Item = (f64, f64)>) -> Vec<(f64, f64)> {
    let mut stairs: Vec<(f64, f64)> = Vec::new();
    for (x, y) in points {
        if let Some(&(_, before)) = stairs.last() {
            stairs.push((x, before));
        }
        stairs.push((x, y));
    }
    stairs
}

fn legend(points: &[Point], front: bool, capacity: bool) -> Vec<(Swatch, Paint, String)> {
    let mut entries = Vec::new();
    for (kind, name) in [
        (Kind::Considered, "priced by the search"),
        (Kind::Predicted, "compared here, predicted"),
        (Kind::Measured, "measured"),
    ] {
        if points.iter().any(|p| p.kind == kind) {
            let (_, form, paint) = kind.mark();
            entries.push((Swatch::Mark(form), paint, name.to_owned()));
        }
    }
    if front {
        let line = Swatch::Line { dashed: false };
        entries.push((
            line,
            Paint::Ink,
            "Pareto front of the layouts priced".to_owned(),
        ));
        entries.push((
            Swatch::Mark(Form::Star),
            Paint::Ink,
            "fastest predicted".to_owned(),
        ));
    }
    if capacity {
        let line = Swatch::Line { dashed: true };
        entries.push((line, Paint::Limit, "capacity".to_owned()));
    }
    entries
}

fn label_winner(scene: &mut Scene, frame: &Frame, (x, y): (f64, f64), winner: &Point, rank: &str) {
    scene.mark((x, y), 10.0, Form::Star, Paint::Ink, Some(tip(winner)));
    let room = 0.6 * (frame.right - frame.left);
    let text = font::cut(&winner.name, BODY, Weight::Medium, room);
    let to_the_right = x + 16.0 + 1.06 * font::width(&text, BODY, Weight::Medium) < frame.right;
    let (anchor, x) = if to_the_right {
        (Anchor::Start, x + 12.0)
    } else {
        (Anchor::End, x - 12.0)
    };
    let mut speed = format!("{} tokens/s/{rank}", format::short_count(winner.speed));
    if !winner.details.is_empty() {
        speed = format!("{speed}, {}", winner.details);
    }
    let speed = font::cut(&speed, SMALL, Weight::Regular, room);
    scene.text((x, y - 21.0), text, BODY, anchor).medium();
    scene
        .text((x, y - 6.0), speed, SMALL, anchor)
        .paint(Paint::Muted);
}

fn tip(point: &Point) -> String {
    format!(
        "{}{}{}: {} tokens/s each, {}{}",
        point.name,
        if point.details.is_empty() { "" } else { ", " },
        point.details,
        format::short_count(point.speed),
        format::gib(point.gib),
        if point.kind == Kind::Measured {
            ", measured"
        } else {
            ""
        }
    )
}

/// A range that holds the values with some air, not below zero.
fn padded(values: impl Iterator<Item = f64>) -> (f64, f64) {
    let (low, high) = values.fold((f64::INFINITY, 0.0_f64), |(low, high), v| {
        (low.min(v), high.max(v))
    });
    let air = 0.08 * (high - low).max(0.05 * high);
    ((low - air).max(0.0), high + 1.6 * air)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_front_goes_on_with_speed_and_names_what_is_compared() {
        let point = |gib, speed, kind| Point {
            gib,
            speed,
            name: String::new(),
            details: String::new(),
            kind,
        };
        let points = [
            point(3.0, 5.0, Kind::Considered),
            point(2.0, 4.0, Kind::Considered),
            point(2.0, 4.0, Kind::Predicted),
            point(4.0, 5.0, Kind::Predicted),
            point(1.0, 0.0, Kind::Considered),
        ];
        let refs: Vec<&Point> = points.iter().collect();
        assert_eq!(pareto(&refs), [&points[4], &points[2], &points[0]]);
    }
}
