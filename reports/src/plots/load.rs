//! How evenly tokens fell on experts: of each run, layer by layer, over its steps and over its experts.

use moefold_profiles::run::StepRecord;

use super::Plot;
use crate::draw::axis::{self, BODY, MARGIN, SMALL, WIDTH};
use crate::draw::color::Paint;
use crate::draw::font::{self, Weight};
use crate::draw::scene::{Anchor, Scene};
use crate::format;
use crate::subject::{Comparison, Measured, Subject};

/// Most runs drawn.
const MAX_RUNS: usize = 4;
/// Most columns of a map; beyond, neighbours share one.
const MAX_COLUMNS: usize = 64;
/// The share of a run, at its end, that the map by expert is of.
const LAST: f64 = 0.25;
/// Height of a map with many layers, and with few: the name of its axis has room beside it.
const HEIGHT: f64 = 220.0;
const LEAST_HEIGHT: f64 = 76.0;
/// Height of a row, where neither says otherwise.
const ROW: f64 = 22.0;
/// Least imbalance that has the strongest colour, so that noise stays pale.
const STRONG: f64 = 2.0;

/// Load over the even share, layer by layer.
struct Map {
    /// `[layers][columns]`.
    rows: Vec<Vec<f64>>,
    /// The first and last of what each column is of.
    columns: Vec<(u64, u64)>,
}

/// The plot; absent where no run routed a token.
pub(crate) fn plot(comparison: &Comparison) -> Option<Plot> {
    let mut runs: Vec<(&Subject, Map, Map)> = comparison
        .runs()
        .filter_map(|(subject, measured)| Some((subject, by_step(measured)?, by_expert(measured)?)))
        .collect();
    let all = runs.len();
    runs.truncate(MAX_RUNS);
    let cells = runs.iter().flat_map(|(_, steps, experts)| {
        let rows = steps.rows.iter().chain(&experts.rows);
        rows.flatten().copied()
    });
    let most = cells.reduce(f64::max)?.max(STRONG);
    let title = "Load of experts";
    let mut subtitle = vec![
        "Left, by step: the busiest expert of each layer over its even share. Right, the mean of the last quarter of \
         steps: every expert over its even share."
            .to_owned(),
    ];
    let maps = runs.iter().flat_map(|(_, steps, experts)| [steps, experts]);
    if maps
        .flat_map(|map| &map.columns)
        .any(|(first, last)| first < last)
    {
        subtitle.push(
            "Where a column is of several steps it is their mean, of several experts the one that is furthest from even."
                .to_owned(),
        );
    }
    if all > MAX_RUNS {
        subtitle.push(format!("The first {MAX_RUNS} of {all} runs."));
    }
    let mut scene = Scene::new(WIDTH, title);
    let mut y = axis::heading(&mut scene, title, &subtitle);
    y = scale(&mut scene, y, most);
    let width = (WIDTH - 2.0 * MARGIN) / 2.0;
    for (subject, steps, experts) in &runs {
        let layers = steps.rows.len();
        let row = (ROW * layers as f64).clamp(LEAST_HEIGHT, HEIGHT) / layers as f64;
        let name = font::fitted(&subject.name, BODY, Weight::Medium, WIDTH - 2.0 * MARGIN);
        scene
            .text((MARGIN, y + 18.0), name, BODY, Anchor::Start)
            .medium();
        for (i, (map, what)) in [(steps, "step"), (experts, "expert")]
            .into_iter()
            .enumerate()
        {
            let left = MARGIN + i as f64 * width + 48.0;
            draw(
                &mut scene,
                (left, y + 28.0),
                (width - 64.0, row),
                map,
                what,
                most,
            );
        }
        y += 28.0 + row * layers as f64 + 50.0;
    }
    scene.height = y;
    Some(Plot {
        stem: "expert-load".to_owned(),
        caption: "White is even. Orange experts are too busy, and the rank that has one is waited for; blue ones \
                  learn little. Columns that stay orange are what balancing is for."
            .to_owned(),
        scene,
    })
}

/// The busiest expert of each layer over its even share, by step.
fn by_step(measured: &Measured) -> Option<Map> {
    let layers = layers(measured)?;
    let steps: Vec<&StepRecord> = measured.steps.iter().collect();
    let columns = grouped(steps.len());
    let column = |layer: usize, group: &std::ops::Range<usize>| {
        let ratios = steps[group.clone()].iter().map(|step| {
            let over = over_even(&[&step.expert_load[layer]]);
            over.into_iter().fold(0.0, f64::max)
        });
        ratios.sum::<f64>() / group.len() as f64
    };
    Some(Map {
        rows: (0..layers)
            .map(|layer| columns.iter().map(|group| column(layer, group)).collect())
            .collect(),
        columns: columns
            .iter()
            .map(|group| (steps[group.start].step, steps[group.end - 1].step))
            .collect(),
    })
}

/// Every expert of each layer over its even share, at the end of the run.
fn by_expert(measured: &Measured) -> Option<Map> {
    let layers = layers(measured)?;
    let all = measured.steps.len();
    let last = &measured.steps[all - ((LAST * all as f64).ceil() as usize).min(all)..];
    let most = measured.steps[0].expert_load.iter().map(Vec::len).max()?;
    let columns = grouped(most);
    let row = |layer: usize| {
        let loads: Vec<&Vec<u64>> = last.iter().map(|step| &step.expert_load[layer]).collect();
        let over = over_even(&loads);
        // Of neighbours the one that is furthest from even.
        let furthest = |group: &std::ops::Range<usize>| {
            let own = over.get(group.start..group.end.min(over.len()))?;
            let far = |ratio: f64| ratio.max(1e-9).ln().abs();
            own.iter()
                .copied()
                .reduce(|a, b| if far(b) > far(a) { b } else { a })
        };
        columns.iter().map_while(furthest).collect()
    };
    Some(Map {
        rows: (0..layers).map(row).collect(),
        columns: columns
            .iter()
            .map(|group| (group.start as u64, group.end as u64 - 1))
            .collect(),
    })
}

/// Layers with experts; none where a step has others or no token was routed.
fn layers(measured: &Measured) -> Option<usize> {
    let shape = |step: &StepRecord| step.expert_load.iter().map(Vec::len).collect::<Vec<_>>();
    let first = shape(measured.steps.first()?);
    let alike = measured.steps.iter().all(|step| shape(step) == first);
    let routed = |step: &StepRecord| {
        step.expert_load
            .iter()
            .all(|load| load.iter().sum::<u64>() > 0)
    };
    let any = !first.is_empty() && alike && measured.steps.iter().all(routed);
    any.then_some(first.len())
}

/// Tokens of every expert over some steps, divided by the mean of all.
fn over_even(loads: &[&Vec<u64>]) -> Vec<f64> {
    let experts = loads.first().map_or(0, |load| load.len());
    let sums: Vec<u64> = (0..experts)
        .map(|e| loads.iter().map(|load| load[e]).sum())
        .collect();
    let even = sums.iter().sum::<u64>() as f64 / experts as f64;
    sums.iter().map(|&sum| sum as f64 / even).collect()
}

/// So many things in at most [`MAX_COLUMNS`] groups of neighbours, of one size but the last.
fn grouped(count: usize) -> Vec<std::ops::Range<usize>> {
    let size = count.div_ceil(MAX_COLUMNS).max(1);
    (0..count)
        .step_by(size)
        .map(|start| start..(start + size).min(count))
        .collect()
}

/// The colour of a ratio, where `most` has the strongest: even is white, equal factors are equal steps.
fn paint(ratio: f64, most: f64) -> Paint {
    const EVEN: u32 = 0xf7_f7_f5;
    const BUSY: u32 = 0xc2_4a_00;
    const IDLE: u32 = 0x1f_4e_8c;
    let share = (ratio.max(1e-9).ln() / most.ln()).clamp(-1.0, 1.0);
    let end = if share > 0.0 { BUSY } else { IDLE };
    let channel = |shift: u32| {
        let of = |color: u32| f64::from(color >> shift & 0xff);
        let mixed = of(EVEN) + share.abs() * (of(end) - of(EVEN));
        (mixed.round() as u32) << shift
    };
    Paint::Rgb(channel(16) | channel(8) | channel(0))
}

/// What colours mean; gives the top of what follows.
fn scale(scene: &mut Scene, top: f64, most: f64) -> f64 {
    const CELLS: i32 = 24;
    const CELL: f64 = 9.0;
    let left = MARGIN + 70.0;
    for i in -CELLS..=CELLS {
        let ratio = most.powf(f64::from(i) / f64::from(CELLS));
        let x = left + f64::from(i + CELLS) * CELL;
        scene.rect((x, top), (CELL + 0.5, 12.0), paint(ratio, most), None);
    }
    let middle = left + (f64::from(CELLS) + 0.5) * CELL;
    let end = left + f64::from(2 * CELLS + 1) * CELL;
    let times = |ratio: f64| format!("{}x", format::three_digits(ratio));
    let text = |scene: &mut Scene, x: f64, y: f64, words: String, anchor: Anchor| {
        scene.text((x, y), words, SMALL, anchor).paint(Paint::Muted);
    };
    text(
        scene,
        left - 8.0,
        top + 11.0,
        times(1.0 / most),
        Anchor::End,
    );
    text(scene, end + 8.0, top + 11.0, times(most), Anchor::Start);
    text(scene, middle, top + 27.0, "even".to_owned(), Anchor::Middle);
    top + 34.0
}

fn draw(
    scene: &mut Scene,
    (left, top): (f64, f64),
    (width, row): (f64, f64),
    map: &Map,
    what: &str,
    most: f64,
) {
    let cell = width / map.columns.len() as f64;
    for (layer, values) in map.rows.iter().enumerate() {
        let y = top + layer as f64 * row;
        for (i, (&ratio, &(first, last))) in values.iter().zip(&map.columns).enumerate() {
            let x = left + cell * i as f64;
            let which = if first == last {
                format!("{what} {first}")
            } else {
                format!("{what}s {first} to {last}")
            };
            let tip = format!("layer {layer}, {which}: {ratio:.2}x");
            // A hair wider, so that no seam shows.
            scene.rect(
                (x, y),
                (cell + 0.3, row + 0.3),
                paint(ratio, most),
                Some(tip),
            );
        }
    }
    let layers = map.rows.len();
    let every = (14.0 / row).ceil().max(1.0) as usize;
    for layer in (0..layers).step_by(every) {
        let at = (left - 6.0, top + (layer as f64 + 0.5) * row + 4.0);
        scene
            .text(at, layer.to_string(), SMALL, Anchor::End)
            .paint(Paint::Muted);
    }
    let bottom = top + row * layers as f64;
    let every = (46.0 / cell).ceil().max(1.0) as usize;
    for (i, (first, _)) in map.columns.iter().enumerate().step_by(every) {
        let at = (left + (i as f64 + 0.5) * cell, bottom + 16.0);
        scene
            .text(at, first.to_string(), SMALL, Anchor::Middle)
            .paint(Paint::Muted);
    }
    let middle = left + width / 2.0;
    scene.text((middle, bottom + 34.0), what, BODY, Anchor::Middle);
    scene
        .text(
            (left - 32.0, top + row * layers as f64 / 2.0),
            "MoE layer",
            BODY,
            Anchor::Middle,
        )
        .upwards();
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn golden_ratios_groups_and_colours() {
        assert_eq!(over_even(&[&vec![1, 3], &vec![2, 2]]), [0.75, 1.25]);
        assert_eq!(grouped(3), [0..1, 1..2, 2..3]);
        let many = grouped(130);
        assert_eq!((many[0].clone(), many.len()), (0..3, 44));
        assert_eq!(many[43], 129..130);
        assert_eq!(paint(1.0, 4.0), Paint::Rgb(0xf7_f7_f5));
        assert_eq!(paint(9.0, 4.0), Paint::Rgb(0xc2_4a_00));
        assert_eq!(paint(0.0, 4.0), Paint::Rgb(0x1f_4e_8c));
    }
}
