//! Prices measured here: profile directories laid over the shipped prices.
//!
//! Ops of one kind, pass and dtype are a family with up to three sizes; its samples correct the shipped
//! price of the whole family (see [`super::surface`]), and a measured product or attention gets its own exactly. Of a CPU
//! nobody knows beforehand how fast its memory is beside its cores: of several prices that differ in it, a family is laid
//! over the one whose shape is nearest to its own ([`unlikeness`]).
//! Collectives of one kind and group get straight lines over bytes; other groups of the kind borrow the ratio
//! of the nearest one. Of kinds that were not measured on a CPU, ops that memory bounds and collectives take as long as measured
//! ones that take as long by formula.
//!
//! Sizes that data decides are many, and of most there are few timings. Where more rows or bytes took less time, both
//! have the mean of all their timings ([`never_falling`]): one that something held up says less of what is
//! larger.

use std::collections::BTreeMap;

use super::curve::Curve;
use super::surface::{LOCAL, Point, Surface};
use crate::collective::{Collective, CollectiveKind};
use crate::cost::{Cost, Source};
use crate::directory::{Key, Profile, Sample, Taken, Wait};
use crate::dtype::Dtype;
use crate::op::{Op, OpKind, Pass};
use crate::statistics::{median, never_falling};
use crate::units::{Bytes, Seconds};

/// What holds of every key.
const MEASURED: &str = "a key has at least one timing";

/// What a timing by itself counts beside one of training, at other sizes of a line.
const APART: f64 = 1e-6;

/// What timings of one shape of a family are off its formula, relative, and by what factor a memory bandwidth that is assumed:
/// one standard deviation each.
const NOISE: f64 = 0.1;
const ASSUMED: f64 = 4.0;

/// Passes, and none.
const PASSES: usize = 1 + Pass::ALL.len();
const DTYPES: usize = Dtype::ALL.len();

/// A kind, ranks and ranks a domain.
type Group = (CollectiveKind, [u32; 2]);

/// Of a family, by the bits of its second and third size: first size, seconds, and of how many timings.
type Lines = BTreeMap<[u64; 2], Vec<[f64; 3]>>;

/// What was measured here, by family.
#[derive(Debug, Clone)]
pub(super) struct Local {
    /// Index into `surfaces` by family; empty without op samples.
    families: Vec<Option<u16>>,
    surfaces: Vec<Surface>,
    collectives: Vec<(CollectiveKind, [u32; 2], Curve)>,
    /// Of all ops that memory bounds, and of all collectives: from seconds by formula to those that were measured.
    like_ops: Option<Curve>,
    like_messages: Option<Curve>,
    /// What ranks wait, by group: where data decides how much they do between two meetings, and elsewhere.
    waits: [Vec<([u32; 2], Waiting)>; 2],
    /// The best a price of an op can be called.
    best: Source,
    /// Whether ops were timed in training, beside whatever ran beside them.
    trained: bool,
}

/// Seconds of ops by a formula that measurements are laid over.
pub(super) struct Base<'a> {
    /// Memory bandwidth over the one that is assumed.
    pub(super) faster: f64,
    pub(super) op: Box<dyn Fn(&Op) -> f64 + 'a>,
}

/// Samples of a profile and by how much its times are to be stretched.
pub(super) struct Scaled<'a> {
    pub(super) profile: &'a Profile,
    pub(super) factor: f64,
}

impl Local {
    /// Lays samples over the shipped prices in seconds: of ops, of which each family has the base whose shape is its own, and
    /// of collectives.
    pub(super) fn new(
        profiles: &[Scaled],
        bases: &[Base<'_>],
        collective: &dyn Fn(&Collective) -> f64,
    ) -> Self {
        // A key measured by several profiles has the timings of all.
        let mut timings: BTreeMap<Key, Vec<f64>> = BTreeMap::new();
        let nearest = nearest_to_training(profiles);
        for Scaled { profile, factor } in profiles {
            let used = |sample: &&Sample| {
                // Copies within one device say nothing of the links between devices.
                let within = profile.shared_device && matches!(sample.key, Key::Collective(_));
                !within && nearest.get(&sample.key) == Some(&sample.taken)
            };
            for Sample { key, seconds, .. } in even(profile).filter(used) {
                let seconds = seconds.iter().map(|seconds| seconds * factor);
                timings.entry(*key).or_default().extend(seconds);
            }
        }
        let (mut ops, mut messages) = (BTreeMap::new(), BTreeMap::new());
        for (key, seconds) in timings {
            let taken = nearest[&key];
            let weight = seconds.len() as f64 * if taken == Taken::Training { 1.0 } else { APART };
            let time = [typical(seconds, taken), weight];
            match key {
                Key::Op(key) => drop(ops.insert(key, time)),
                Key::Collective(key) => drop(messages.insert(key, time)),
                Key::Host(_) => {}
            }
        }
        let scaled = profiles.iter().any(|scaled| scaled.factor != 1.0);
        let mut local = Self {
            families: Vec::new(),
            surfaces: Vec::new(),
            collectives: Vec::new(),
            like_ops: like(&ops, |op| {
                (!op.is_bound_by_sms()).then(|| (bases[0].op)(op))
            }),
            like_messages: like(&messages, |message| Some(collective(message))),
            waits: waits(profiles),
            best: if scaled {
                Source::Interpolated
            } else {
                Source::Measured
            },
            trained: (nearest.iter())
                .any(|(key, taken)| matches!(key, Key::Op(_)) && *taken == Taken::Training),
        };
        local.add_ops(ops, bases);
        local.add_collectives(messages, collective);
        local
    }

    /// Whether ops were timed in training.
    pub(super) fn is_of_training(&self) -> bool {
        self.trained
    }

    /// Seconds of ops, and of how many timings.
    fn add_ops(&mut self, ops: BTreeMap<Op, [f64; 2]>, bases: &[Base<'_>]) {
        let mut families: BTreeMap<usize, (Op, Lines)> = BTreeMap::new();
        for (key, [seconds, weight]) in ops {
            let ([first, second, third], times) = sizes(&key);
            let family = families.entry(family(&key));
            let (_, lines) = family.or_insert_with(|| (key, Lines::new()));
            let line = lines.entry([second, third].map(f64::to_bits)).or_default();
            line.push([first, seconds / times, weight]);
        }
        if !families.is_empty() {
            self.families = vec![None; OpKind::ALL.len() * PASSES * DTYPES * 2];
        }
        for (index, (template, lines)) in families {
            let points: Vec<Point> = (lines.into_iter())
                .flat_map(|(others, line)| {
                    let [second, third] = others.map(f64::from_bits);
                    // Data decides no size of these: each has its own tiles.
                    let fixed = matches!(template, Op::Gemm { .. } | Op::Attention { .. });
                    let fitted: Vec<[f64; 2]> = if fixed {
                        line.iter().map(|&[first, time, _]| [first, time]).collect()
                    } else {
                        never_falling(line)
                    };
                    fitted.into_iter().map(move |[first, time]| Point {
                        at: [first, second, third],
                        time,
                    })
                })
                .collect();
            let (_, times) = sizes(&template);
            let of = |base: &Base<'_>, at| (base.op)(&resized(&template, at)) / times;
            let scored = bases.iter().map(|base| {
                let score = unlikeness(&points, base.faster, |at| of(base, at));
                (if score.is_finite() { score } else { f64::MAX }, base)
            });
            let nearest = scored.min_by(|a, b| a.0.total_cmp(&b.0));
            let (_, nearest) = nearest.expect("what ships");
            let base = |at: [f64; 3]| of(nearest, at);
            self.families[index] = Some(self.surfaces.len() as u16);
            self.surfaces
                .push(Surface::new(&points, base, LOCAL, reach(&template)));
        }
    }

    fn add_collectives(
        &mut self,
        messages: BTreeMap<Collective, [f64; 2]>,
        shipped: &dyn Fn(&Collective) -> f64,
    ) {
        let mut curves: BTreeMap<Group, Vec<[f64; 3]>> = BTreeMap::new();
        for (key, [time, weight]) in messages {
            let group = [key.ranks, key.ranks_per_domain];
            let points = curves.entry((key.kind, group)).or_default();
            points.push([key.bytes.0.max(1) as f64, time, weight]);
        }
        for ((kind, group), points) in curves {
            let fitted = never_falling(points).into_iter();
            let mut points: Vec<(f64, f64)> = fitted.map(|[bytes, time]| (bytes, time)).collect();
            let at = |bytes: f64| {
                shipped(&Collective {
                    kind,
                    bytes: Bytes(bytes as u64),
                    ranks: group[0],
                    ranks_per_domain: group[1],
                })
            };
            // What is measured says how much a byte more takes, and so does the shipped price, both as far as the largest
            // message takes longer than a short one; but a message has a fixed part.
            let (least, first) = points[0];
            let (most, last) = points[points.len() - 1];
            let measured = (last - first) / (most - least).max(1.0) * (1.0 - first / last);
            let by_size = 1.0 - at(1.0) / at(most);
            let shipped = (at(2.0 * most) - at(most)) / most * (last / at(most)).powf(by_size);
            let beyond = measured.max(shipped).min(last / most);
            if points.len() == 1 {
                // One size says nothing of smaller ones: the shipped price gives the shape.
                let smaller = (most / 64.0).max(1.0);
                points.insert(0, (smaller, at(smaller) * last / at(most)));
            }
            self.collectives
                .push((kind, group, Curve::lines(points, beyond)));
        }
    }

    /// The price of an op whose family was measured.
    pub(super) fn op(&self, op: &Op) -> Option<Cost> {
        let surface = (*self.families.get(family(op))?)?;
        let (at, times) = sizes(op);
        let (time, source) = self.surfaces[usize::from(surface)].time(at);
        Some(Cost {
            time: Seconds(time * times),
            source: source.max(self.best),
        })
    }

    /// Seconds of an op that memory bounds, of a kind that was not measured, by those of its formula.
    pub(super) fn like_ops(&self, formula_s: f64) -> f64 {
        let others = self.like_ops.as_ref();
        others.map_or(formula_s, |others| others.at(formula_s))
    }

    /// The same of a collective.
    pub(super) fn like_messages(&self, formula_s: f64) -> f64 {
        let others = self.like_messages.as_ref();
        others.map_or(formula_s, |others| others.at(formula_s))
    }

    /// See [`super::Costs::waiting`]. The nearest group speaks for others. Where `loads_are_known`, and where no
    /// exchange of tokens was measured, an exchange has what other collectives have.
    pub(super) fn waiting(&self, collective: &Collective, loads_are_known: bool) -> Waiting {
        let group = [collective.ranks, collective.ranks_per_domain];
        let near = |waits: &[([u32; 2], Waiting)]| {
            let far = |wait: &&([u32; 2], Waiting)| distance(wait.0, group);
            let nearest = waits.iter().min_by(|a, b| far(a).total_cmp(&far(b)));
            nearest.map(|(_, waiting)| *waiting)
        };
        let [of_tokens, others] = &self.waits;
        let of_tokens = (collective.is_of_tokens() && !loads_are_known).then_some(of_tokens);
        let own = of_tokens.and_then(|waits| near(waits));
        own.or_else(|| near(others)).unwrap_or_default()
    }

    /// The price of a collective whose kind was measured.
    pub(super) fn collective(
        &self,
        collective: &Collective,
        shipped: &dyn Fn(&Collective) -> f64,
    ) -> Option<Cost> {
        let bytes = collective.bytes.0.max(1) as f64;
        let group = [collective.ranks, collective.ranks_per_domain];
        let (_, nearest, curve) = self
            .collectives
            .iter()
            .filter(|(kind, ..)| *kind == collective.kind)
            .min_by(|a, b| distance(a.1, group).total_cmp(&distance(b.1, group)))?;
        if *nearest == group {
            let source = if curve.is_point(bytes) {
                Source::Measured
            } else if curve.covers(bytes) {
                Source::Interpolated
            } else {
                Source::Extrapolated
            };
            return Some(Cost {
                time: Seconds(curve.at(bytes)),
                source,
            });
        }
        let other = Collective {
            ranks: nearest[0],
            ranks_per_domain: nearest[1],
            ..*collective
        };
        let time = curve.at(bytes) * shipped(collective) / shipped(&other);
        Some(Cost {
            time: Seconds(time),
            source: Source::Extrapolated,
        })
    }
}

/// From seconds by formula to those that were measured, over all of some kinds; none of none.
fn like<K>(measured: &BTreeMap<K, [f64; 2]>, formula: impl Fn(&K) -> Option<f64>) -> Option<Curve> {
    let points = measured.iter().filter_map(|(key, &[seconds, weight])| {
        let by_formula = formula(key)?;
        Some([by_formula, seconds, weight])
    });
    let fitted = never_falling(points.collect());
    let points = fitted
        .into_iter()
        .map(|[formula, seconds]| (formula, seconds));
    let mut points = points.peekable();
    points.peek()?;
    // What is longer or shorter than all of them is so many times as far from its formula as the last.
    Some(Curve::rising(points, [1.0; 2]))
}

/// How unlikely points are where times are some base's, stretched alike: the sum of their squared deviations, relative to
/// [`NOISE`], and the square of the memory's speed, which is [`ASSUMED`] to within a factor.
fn unlikeness(points: &[Point], faster: f64, base: impl Fn([f64; 3]) -> f64) -> f64 {
    let ratios: Vec<f64> = (points.iter())
        .map(|point| (point.time / base(point.at)).ln())
        .collect();
    let mean = ratios.iter().sum::<f64>() / ratios.len().max(1) as f64;
    let squares = ratios.iter().map(|ratio| ((ratio - mean) / NOISE).powi(2));
    squares.sum::<f64>() + (faster.ln() / ASSUMED.ln()).powi(2)
}

/// How little one group says of another.
fn distance(a: [u32; 2], b: [u32; 2]) -> f64 {
    let far = |a: u32, b: u32| (f64::from(a.max(1)) / f64::from(b.max(1))).ln().abs();
    // A group that crosses domains says little about one that does not.
    let crossing = (a[0] > a[1]) != (b[0] > b[1]);
    far(a[0], b[0]) + far(a[1], b[1]) + if crossing { 10.0 } else { 0.0 }
}

/// What the mean of some ranks waits at a collective for the last of them.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Waiting {
    /// Seconds each time that they meet.
    pub each_s: f64,
    /// Of the time since they last met.
    pub share: f64,
}

impl Waiting {
    /// Seconds, where they met so long ago.
    pub fn after(&self, apart_s: f64) -> f64 {
        self.each_s + self.share * apart_s
    }

    /// The line through what was waited at each of some collectives, whose deviations are relative to the time apart: what
    /// ranks do between two meetings differs by so much of it. Neither part is below nothing.
    fn of(keys: &[Wait]) -> Self {
        // Of a meeting: what is waited over what is apart, by the inverse of the latter.
        let each = || {
            let keys = keys.iter().filter(|key| key.apart_s > 0.0 && key.times > 0);
            keys.map(|key| {
                let times = key.times as f64;
                (times, times / key.apart_s, key.waited_s / key.apart_s)
            })
        };
        let times: f64 = each().map(|(times, ..)| times).sum();
        let mean = |of: &dyn Fn(f64, f64) -> f64| {
            let sum: f64 = each().map(|(times, x, y)| times * of(x, y)).sum();
            sum / times.max(1.0)
        };
        let (x, y) = (mean(&|x, _| x), mean(&|_, y| y));
        let spread = mean(&|own, _| (own - x).powi(2));
        let each_s = mean(&|own, of| (own - x) * (of - y)) / spread;
        if spread > 1e-6 * x * x && each_s > 0.0 && y > each_s * x {
            Self {
                each_s,
                share: y - each_s * x,
            }
        } else {
            let all: Wait = keys.iter().copied().sum();
            Self {
                each_s: 0.0,
                share: all.waited_s / all.apart_s.max(f64::MIN_POSITIVE),
            }
        }
    }

    /// The same where so much was waited in all.
    fn scaled_to(self, all: Wait) -> Self {
        let line_s = self.each_s * all.times as f64 + self.share * all.apart_s;
        let scaled = [self.each_s, self.share].map(|part| part * (all.waited_s / line_s));
        // Nothing is divided by nothing where nobody waited.
        let [each_s, share] = scaled.map(|part| if part.is_finite() { part } else { 0.0 });
        Self { each_s, share }
    }
}

/// What ranks wait for the last of them, by group: at exchanges of tokens, between which the loads of experts differ, and at all
/// other collectives. One line through all groups, as some meet only shortly after others, with what each waited in all.
fn waits(profiles: &[Scaled]) -> [Vec<([u32; 2], Waiting)>; 2] {
    let mut keys: [Vec<Wait>; 2] = Default::default();
    let mut groups: [BTreeMap<[u32; 2], Wait>; 2] = Default::default();
    for Scaled { profile, factor } in profiles {
        for sample in &profile.samples {
            let Key::Collective(key) = sample.key else {
                continue;
            };
            let mut all: Wait = sample.waits.iter().copied().sum();
            all.waited_s *= factor;
            all.apart_s *= factor;
            if all.apart_s > 0.0 {
                let class = usize::from(!key.is_of_tokens());
                keys[class].push(all);
                let group = [key.ranks, key.ranks_per_domain];
                let sum = groups[class].entry(group).or_default();
                *sum = *sum + all;
            }
        }
    }
    let lines = keys.map(|keys| Waiting::of(&keys));
    let mut lines = lines.into_iter();
    groups.map(|groups| {
        let line = lines.next().expect("one for each");
        let of_group = |(group, all)| (group, line.scaled_to(all));
        groups.into_iter().map(of_group).collect()
    })
}

/// The time that stands for timings: in training their mean, since a step is the sum of them all; of
/// runs by themselves the median, since nothing should have disturbed them.
fn typical(seconds: Vec<f64>, taken: Taken) -> f64 {
    match taken {
        Taken::Training => seconds.iter().sum::<f64>() / seconds.len().max(1) as f64,
        Taken::Cold | Taken::Repeated => median(seconds).expect(MEASURED),
    }
}

/// The samples that prices come from.
fn even(profile: &Profile) -> impl Iterator<Item = &Sample> {
    let samples = profile.samples.iter();
    samples.filter(|sample| sample.skew.is_none())
}

/// The conditions that come nearest to training's, by key.
fn nearest_to_training(profiles: &[Scaled]) -> BTreeMap<Key, Taken> {
    let mut nearest = BTreeMap::new();
    for sample in profiles.iter().flat_map(|scaled| even(scaled.profile)) {
        let taken = nearest.entry(sample.key).or_insert(sample.taken);
        *taken = sample.taken.min(*taken);
    }
    nearest
}

/// Index of an op's family: kind, pass, dtype and mask.
fn family(op: &Op) -> usize {
    let pass = op.pass().map_or(0, |pass| 1 + pass as usize);
    let dtype = op.dtype() as usize;
    let masked = usize::from(matches!(op, Op::Attention { causal: true, .. }));
    ((op.kind() as usize * PASSES + pass) * DTYPES + dtype) * 2 + masked
}

/// The sizes a family is tabulated over, and how many times that work is done.
fn sizes(op: &Op) -> ([f64; 3], f64) {
    let (at, times) = match *op {
        Op::Gemm { m, n, k, .. } => ([m, n, k], 1),
        Op::GroupedGemm {
            groups, rows, n, k, ..
        } => {
            let groups = groups.max(1);
            // Rows of a group may be a fraction.
            let rows = (rows as f64 / groups as f64).max(1.0);
            return ([rows, n.max(1) as f64, k.max(1) as f64], groups as f64);
        }
        Op::Attention {
            batch,
            heads,
            q_len,
            kv_len,
            qk_dim,
            v_dim,
            ..
        } => {
            let positions = (q_len as f64 * kv_len as f64).sqrt();
            let width = (qk_dim + v_dim) as f64 / 2.0;
            let at = [(batch * heads) as f64, positions, width];
            return (at.map(|size| size.max(1.0)), 1.0);
        }
        Op::RmsNorm { rows, dim, .. }
        | Op::Rope { rows, dim, .. }
        | Op::Swiglu { rows, dim, .. }
        | Op::Permute { rows, dim, .. }
        | Op::Unpermute { rows, dim, .. }
        | Op::Embedding { rows, dim, .. } => ([rows, dim, 1], 1),
        Op::LatentKv {
            rows,
            heads,
            nope,
            rope,
            v_dim,
            ..
        } => ([rows, heads, 2 * (nope + v_dim) + rope], 1),
        Op::CrossEntropy { rows, vocab, .. } => ([rows, vocab, 1], 1),
        Op::Router {
            rows,
            experts,
            topk,
            ..
        } => ([rows, experts, topk], 1),
        Op::Add { len, .. }
        | Op::Sweep { len, .. }
        | Op::Adamw { len, .. }
        | Op::GradNorm { len } => ([len, 1, 1], 1),
        Op::LinearAttention {
            rows,
            heads,
            state,
            width,
            ..
        } => ([rows, heads * state, width], 1),
    };
    (at.map(|size| size.max(1) as f64), f64::from(times))
}

/// The sizes a family is tabulated over; an axis it does not have stays 1.
fn reach(op: &Op) -> [[f64; 2]; 3] {
    const ROWS: f64 = 67_108_864.0;
    const WIDTH: f64 = 1_048_576.0;
    let most = match op {
        Op::Gemm { .. } | Op::GroupedGemm { .. } => [WIDTH; 3],
        // Heads, positions, width of a head.
        Op::Attention { .. } => [16384.0, 2.0 * WIDTH, 1024.0],
        Op::Router { .. } => [ROWS, 16384.0, 1024.0],
        Op::LatentKv { .. } => [ROWS, 16384.0, 4096.0],
        Op::LinearAttention { .. } => [ROWS, WIDTH, WIDTH],
        Op::Add { .. } | Op::Sweep { .. } | Op::Adamw { .. } | Op::GradNorm { .. } => {
            [1024.0 * ROWS, 1.0, 1.0]
        }
        _ => [ROWS, WIDTH, 1.0],
    };
    most.map(|most| [1.0, most])
}

/// An op of the same family at other sizes.
fn resized(template: &Op, at: [f64; 3]) -> Op {
    let [a, b, c] = at.map(|size| size.round().max(1.0) as u64);
    let mut op = *template;
    match &mut op {
        Op::Gemm { m, n, k, .. } => (*m, *n, *k) = (a, b, c),
        Op::GroupedGemm {
            groups, rows, n, k, ..
        } => {
            *rows = (at[0] * (*groups).max(1) as f64).round().max(1.0) as u64;
            (*n, *k) = (b, c);
        }
        Op::Attention {
            batch,
            heads,
            kv_heads,
            q_len,
            kv_len,
            qk_dim,
            v_dim,
            ..
        } => {
            *kv_heads = (a * *kv_heads / (*heads).max(1)).max(1);
            (*batch, *heads) = (1, a);
            (*q_len, *kv_len) = (b, b);
            (*qk_dim, *v_dim) = (c, c);
        }
        Op::RmsNorm { rows, dim, .. }
        | Op::Rope { rows, dim, .. }
        | Op::Swiglu { rows, dim, .. }
        | Op::Permute { rows, dim, .. }
        | Op::Unpermute { rows, dim, .. }
        | Op::Embedding { rows, dim, .. } => (*rows, *dim) = (a, b),
        Op::LatentKv {
            rows,
            heads,
            nope,
            rope,
            v_dim,
            ..
        } => {
            // The parts of a head keep their shares.
            let whole = (2 * (*nope + *v_dim) + *rope).max(1);
            let share = |part: u64| (part as f64 * at[2] / whole as f64).round() as u64;
            (*rows, *heads) = (a, b);
            (*nope, *rope, *v_dim) = (share(*nope), share(*rope), share(*v_dim));
        }
        Op::CrossEntropy { rows, vocab, .. } => (*rows, *vocab) = (a, b),
        Op::Router {
            rows,
            experts,
            topk,
            ..
        } => (*rows, *experts, *topk) = (a, b, c),
        Op::Add { len, .. }
        | Op::Sweep { len, .. }
        | Op::Adamw { len, .. }
        | Op::GradNorm { len } => *len = a,
        Op::LinearAttention {
            rows,
            heads,
            state,
            width,
            ..
        } => {
            *rows = a;
            (*heads, *state) = (1, b);
            *width = c;
        }
    }
    op
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn law_resizing_to_its_own_sizes_keeps_the_work() {
        for op in super::super::tests::every_op(384) {
            let (at, times) = sizes(&op);
            let same = resized(&op, at);
            assert_eq!(family(&same), family(&op));
            assert!(
                (same.flops().0 - op.flops().0).abs() <= 1e-9 * op.flops().0,
                "{op:?}"
            );
            assert!(times >= 1.0 && at.iter().all(|&size| size >= 1.0));
            let (bytes, own) = (same.bytes().0 as f64, op.bytes().0 as f64);
            // Attention's batch is folded into heads, which rounds nothing here.
            assert!((bytes - own).abs() <= 0.01 * own, "{op:?}");
        }
    }
}
