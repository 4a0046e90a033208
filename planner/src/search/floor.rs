//! [`Works`]: the work of layouts by their degrees, known before their [`Shape`]s are; and [`floor_s`], what no
//! split of it and no schedule can beat.
//!
//! A space has tens of thousands of shapes, of which a few hundred come near the best. But a mixer and a feed-forward
//! block without experts know nothing of the experts' degrees, and experts of a sequence only how many tokens there are;
//! so of blocks there are few, and a layer takes no less than its two.

use std::collections::BTreeMap;

use moefold_profiles::trace::Category;
use moefold_profiles::units::Bytes;
use rayon::prelude::*;

use super::recompute::Sets;
use super::shape::{Question, Shape};
use super::watch::{Looks, Phase, Watch};
use crate::choice::{CpComm, Dispatcher, ScheduleName};
use crate::layout::Layout;
use crate::local::Local;
use crate::memory;
use crate::model::Layer;
use crate::price::{Breakdown, price};
use crate::runtime::{Block, Lowered, Piece, Setting};
use crate::shard::{self, Shard};

/// The work of one microbatch over all stages.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ShapeWork {
    /// Seconds of both passes.
    pub(crate) all_s: f64,
    /// The same of the lightest layer.
    pub(crate) lightest_s: f64,
    /// The least share of the forward pass in both, over layers and the ends of the model.
    pub(crate) least_forward: f64,
}

impl ShapeWork {
    /// Of the seconds of the forward pass and of both, of layers and of the ends of the model, each with how many
    /// are alike.
    pub(crate) fn of(
        layers: impl Iterator<Item = ([f64; 2], u32)>,
        ends: impl Iterator<Item = [f64; 2]>,
    ) -> Self {
        let mut work = Self {
            all_s: 0.0,
            lightest_s: f64::INFINITY,
            least_forward: 1.0,
        };
        let mut add = |[forward_s, both_s]: [f64; 2], count: u32| {
            work.all_s += both_s * f64::from(count);
            if both_s > 0.0 {
                work.least_forward = work.least_forward.min(forward_s / both_s);
            }
        };
        let mut lightest_s = f64::INFINITY;
        for (seconds, count) in layers.filter(|(_, count)| *count > 0) {
            lightest_s = lightest_s.min(seconds[1]);
            add(seconds, count);
        }
        ends.for_each(|seconds| add(seconds, 1));
        work.lightest_s = lightest_s;
        work
    }
}

/// Seconds that no split of the layers and no schedule of a layout can beat.
///
/// With `m` microbatches a rank works at least `m w` for its share `w` of a microbatch, after a forward pass and
/// before a backward pass of one through the ranks before it ([`crate::simulate::lower_bound`]). What is least over
/// all shares then has all ranks end together: each has `1 - 1/m` of what the one before it has. Where backward
/// passes are divided, only the forward pass is sure to come before. With several stages a rank, only the first is,
/// which has a layer at least where stages were not given and there are no more of them than layers.
pub(crate) fn floor_s(question: &Question<'_>, layout: &Layout, work: &ShapeWork) -> f64 {
    let (pp, microbatches) = (f64::from(layout.pp()), f64::from(layout.microbatches()));
    let layers = question.kind_of.len() as u32;
    // Layers are whole: the busiest rank holds at least its rounded-up share.
    let whole = f64::from(layers.div_ceil(layout.pp())) * work.lightest_s;
    let share = microbatches * (work.all_s / pp).max(whole);
    let divides = question
        .schedules(layout.pp(), layout.vpp())
        .any(ScheduleName::divides_backward);
    let before = if divides { work.least_forward } else { 1.0 };
    let filled = if layout.pp() == 1 || before <= 0.0 {
        share
    } else if layout.vpp() > 1 {
        let bare = question.options.stages.is_some() || layout.stages() > layers;
        let stage_s = if bare { 0.0 } else { work.lightest_s };
        microbatches * work.all_s / pp + before * stage_s * (pp - 1.0) / 2.0
    } else {
        let kept = 1.0 - before / microbatches;
        before * work.all_s / (1.0 - kept.powf(pp))
    };
    // Simulated time is whole nanoseconds.
    share.max(filled) * (1.0 - 1e-6)
}

/// The whole of a model on a rank, by the degrees that divide it.
pub(crate) type Weights = BTreeMap<[u32; 3], Shard>;

/// Bytes that the fullest rank of a layout holds at least: its share of the weights and their states, on average
/// over pipeline ranks. `known` is what was asked before.
pub(crate) fn held(question: &Question<'_>, layout: &Layout, known: &mut Weights) -> Bytes {
    let model = question.model;
    let whole = known
        .entry([layout.tp(), layout.ep(), layout.etp()])
        .or_insert_with(|| {
            let local = &Local::new(layout, model, &question.options.batch, 1.0);
            let layers = question.kind_of.iter();
            let layers = layers.map(|&kind| question.distinct[kind].layer);
            let layers = layers.map(|layer| shard::layer(model, layer, local));
            let head = shard::head(model, local);
            // A head that is tied is a matrix of its own in a pipeline alone.
            let embedding = (!model.tied_embeddings).then(|| shard::embedding(model, local));
            let parts = layers.chain(embedding).chain(shard::mtp(model, local));
            parts.fold(head, |sum, part| sum + part)
        });
    let pp = u64::from(layout.pp());
    let mean = [whole.dense() / pp, whole.experts / pp];
    let shards = question.divided(layout);
    let (options, stack) = (question.options, &question.stack);
    let mut bytes = question.state_bytes();
    if !options.optimizer_offload.is_none() {
        // Some of them rest on the host.
        bytes.sharded = 0.0;
    }
    // The least that they may take: in a pipeline some are there twice, where they are wider or narrower.
    let bounds = [0, whole.wide.div_ceil(pp)];
    let held = bounds.map(|wide| {
        let held = if question.shards_weights() {
            memory::fully_sharded(mean, wide, bytes, shards, Bytes::ZERO)
        } else if question.shards_gradients() {
            memory::gradients_sharded(mean, wide, bytes, shards, Bytes::ZERO)
        } else {
            memory::state(mean, wide, bytes, shards.states)
        };
        held.total()
    });
    let held = held[0].min(held[1]);
    held + held.scale(stack.fragmentation()) + stack.common().context
}

/// What a pass costs on the device, what the host takes to issue it, and seconds of it that another pass may hide.
type Pass = [f64; 3];

/// Both passes of a block.
#[derive(Debug, Clone, Copy, Default)]
struct Passes([Pass; 2]);

impl Passes {
    fn of(question: &Question<'_>, lowered: &Lowered) -> Self {
        // Waiting and copies depend on what comes before and after.
        let hides = question.stack.hides(question.overlap).expert_alltoall;
        let pass = |breakdown: Breakdown| {
            let others = [Category::Waiting, Category::Offload].map(|c| breakdown.get(c));
            let device_s = breakdown.device() - others.iter().sum::<f64>();
            let sent_s = if hides {
                question.hides_at_most() * breakdown.get(Category::EpComm)
            } else {
                0.0
            };
            [device_s, breakdown.issued_s(), sent_s]
        };
        let of = |work| pass(price(work, question.costs, &question.stack, |_, _| {}));
        Self([of(&lowered.forward), of(&lowered.backward)])
    }

    fn and(self, other: Self) -> Self {
        let pass = |pass: usize| std::array::from_fn(|i| self.0[pass][i] + other.0[pass][i]);
        Self([pass(0), pass(1)])
    }

    /// Seconds of the forward pass and of both, where one block comes with another.
    fn with(self, other: Self, question: &Question<'_>) -> [f64; 2] {
        let pass = |[device_s, host_s, sent_s]: Pass| {
            // What is hidden goes from a pass whose launches were waited for, as it does where it is priced.
            device_s + question.stack.host_excess(host_s, device_s) - sent_s
        };
        let [forward_s, backward_s] = self.and(other).0.map(pass);
        [forward_s, forward_s + backward_s]
    }
}

/// What the degrees of attention decide.
#[derive(Debug)]
struct Attention {
    /// Mixers, and with them feed-forward blocks without experts, by way to the keys of other ranks and by kind of layer.
    mixers: Vec<Vec<Passes>>,
    /// The embedding, and the head where it has no experts.
    ends: Vec<Passes>,
}

/// See the module's documentation.
#[derive(Debug)]
pub(crate) struct Works {
    /// By tp, cp and mbs.
    attention: BTreeMap<[u32; 3], Attention>,
    /// Feed-forward blocks of experts by tp, tokens, ep and etp: of each dispatcher that is tried, by kind of layer.
    experts: BTreeMap<[u64; 4], Vec<Vec<Passes>>>,
    /// Layers of each kind.
    layers: Vec<u32>,
}

fn attention_key(layout: &Layout) -> [u32; 3] {
    [layout.tp(), layout.cp(), layout.mbs()]
}

fn experts_key(question: &Question<'_>, layout: &Layout) -> [u64; 4] {
    let tokens = question.options.batch.seq_len * u64::from(layout.mbs());
    [
        layout.tp().into(),
        tokens.div_ceil(layout.cp().into()),
        layout.ep().into(),
        layout.etp().into(),
    ]
}

impl Works {
    /// Prices the blocks of some layouts, each once; none where the search is stopped before.
    pub(crate) fn new<'l>(
        question: &Question<'_>,
        layouts: impl Iterator<Item = &'l Layout> + Clone,
        watch: &Watch<'_>,
    ) -> Option<Self> {
        let mut attention: BTreeMap<[u32; 3], &Layout> = BTreeMap::new();
        let mut experts: BTreeMap<[u64; 4], &Layout> = BTreeMap::new();
        for layout in layouts {
            attention.entry(attention_key(layout)).or_insert(layout);
            let key = experts_key(question, layout);
            experts.entry(key).or_insert(layout);
        }
        let mut layers = vec![0; question.distinct.len()];
        for &kind in &question.kind_of {
            layers[kind] += 1;
        }
        let all = attention.len() + experts.len();
        let looks = &Looks::new(watch, Phase::Pricing, all);
        Some(Self {
            attention: each(attention, looks, |layout| Attention::new(question, layout))?,
            experts: each(experts, looks, |layout| {
                let dispatchers = question.dispatchers_for(layout.ep(), layout.etp());
                // Which knows no keys.
                let way = CpComm::default();
                let under = |&dispatcher| {
                    let routed = |layer: &Layer| layer.moe().is_some();
                    blocks(
                        question,
                        layout,
                        (dispatcher, way),
                        Block::FeedForward,
                        routed,
                    )
                };
                dispatchers.iter().map(under).collect()
            })?,
            layers,
        })
    }

    /// The work of a layout's shapes, in their order: no more than [`Shape::work`] of it.
    pub(crate) fn of(&self, question: &Question<'_>, layout: &Layout) -> Vec<ShapeWork> {
        let attention = &self.attention[&attention_key(layout)];
        let each = &self.experts[&experts_key(question, layout)];
        let shapes = attention.mixers.iter();
        let shapes = shapes.flat_map(|mixers| each.iter().map(move |blocks| (mixers, blocks)));
        shapes
            .map(|(mixers, blocks)| {
                let both = mixers.iter().zip(blocks);
                let both = both.map(|(mixer, block)| mixer.with(*block, question));
                let ends = attention.ends.iter();
                ShapeWork::of(
                    both.zip(self.layers.iter().copied()),
                    ends.map(|end| end.with(Passes::default(), question)),
                )
            })
            .collect()
    }
}

fn each<K: Ord + Send, T: Send>(
    layouts: BTreeMap<K, &Layout>,
    looks: &Looks<'_>,
    of: impl Fn(&Layout) -> T + Sync,
) -> Option<BTreeMap<K, T>> {
    let work: Vec<(K, &Layout)> = layouts.into_iter().collect();
    let done: Option<Vec<(K, T)>> = work
        .into_par_iter()
        .map(|(key, layout)| looks.one(|| (key, of(layout))))
        .collect();
    Some(done?.into_iter().collect())
}

/// A block of each kind of layer; nothing of those that are left out.
fn blocks(
    question: &Question<'_>,
    layout: &Layout,
    wires: (Dispatcher, CpComm),
    block: Block,
    wanted: impl Fn(&Layer) -> bool,
) -> Vec<Passes> {
    let timed = question.timed(layout);
    let groups = question.layer_groups(layout, wires.1);
    let each = question.distinct.iter().zip(&timed);
    each.map(|(distinct, local)| {
        if !wanted(distinct.layer) {
            return Passes::default();
        }
        let setting = question.setting(layout, wires, local, &groups);
        let lowered = question.runtime.block(&setting, distinct.layer, block);
        Passes::of(question, &lowered)
    })
    .collect()
}

impl Attention {
    fn new(question: &Question<'_>, layout: &Layout) -> Self {
        let dispatcher = question.dispatchers[0];
        let timed = question.timed(layout);
        // Ends of the model have no keys.
        let ends = (dispatcher, CpComm::default());
        let groups = question.layer_groups(layout, ends.1);
        let [.., embedding, head] = timed.as_slice() else {
            unreachable!("the ends of the model are among its pieces")
        };
        let end = |(piece, local): (Piece<'_>, &Local)| {
            let setting: Setting<'_> = question.setting(layout, ends, local, &groups);
            let lowered = question.runtime.work(&setting, piece, &[]);
            Passes::of(question, &lowered)
        };
        // Depths of multi-token prediction, which are the head's, have experts.
        let head = question.model.mtp.is_empty().then_some((Piece::Head, head));
        let ways = question.keys.legal(layout.tp(), layout.cp());
        let dense = |layer: &Layer| layer.moe().is_none();
        let dense = blocks(question, layout, ends, Block::FeedForward, dense);
        let mixers = ways.map(|way| {
            let mixers = blocks(question, layout, (dispatcher, way), Block::Mixer, |_| true);
            let both = mixers.into_iter().zip(&dense);
            both.map(|(mixer, &dense)| mixer.and(dense)).collect()
        });
        Self {
            mixers: mixers.collect(),
            ends: [(Piece::Embedding, embedding)]
                .into_iter()
                .chain(head)
                .map(end)
                .collect(),
        }
    }
}

impl Shape {
    /// The work of one microbatch over all stages, without recomputation beyond that of the first choice.
    pub(crate) fn work(&self, question: &Question<'_>) -> ShapeWork {
        self.work_under(question, &question.choices[0])
    }

    /// The same under some recompute sets.
    pub(crate) fn work_under(&self, question: &Question<'_>, sets: &Sets) -> ShapeWork {
        let layers = (0..).zip(&question.kind_of);
        let layers = layers.map(|(layer, &kind)| {
            let kind = &self.kinds[kind];
            (kind.least_s(question, sets.least(layer)), 1)
        });
        let ends = [&self.embedding, &self.head];
        let ends = ends.map(|end| end.least_s(question, sets.of_ends()));
        ShapeWork::of(layers, ends.into_iter())
    }

    /// The same where each layer takes so many seconds more than under the first set, and at most what it takes under
    /// another.
    pub(crate) fn work_and(
        &self,
        question: &Question<'_>,
        more_s: f64,
        at_most: usize,
    ) -> ShapeWork {
        let kinds = || question.kind_of.iter().map(|&kind| &self.kinds[kind]);
        let layers = kinds().map(|kind| {
            let [forward_s, both_s] = kind.least_s(question, 0);
            ([forward_s, both_s + more_s], 1)
        });
        let ends = [&self.embedding, &self.head].map(|end| end.least_s(question, 0));
        let mut work = ShapeWork::of(layers, ends.into_iter());
        let forward = kinds().map(|kind| {
            let [forward_s, both_s] = kind.least_s(question, at_most);
            forward_s / both_s
        });
        work.least_forward = forward.fold(work.least_forward, f64::min);
        work
    }
}

#[cfg(test)]
mod tests {
    use moefold_profiles::Dtype;
    use moefold_profiles::pricing::Costs;

    use super::*;
    use crate::choice::{StackName, Zero};
    use crate::layout::Batch;
    use crate::model::presets;
    use crate::options::{Effort, SearchOptions};
    use crate::rules::{Rules, Variants};
    use crate::search::judged::candidates;
    use crate::search::questions::question;
    use crate::search::shape::Shapes;
    use crate::search::watch::unwatched;
    use crate::search::{Asked, plan};
    use crate::stack::megatron::Declared;
    use moefold_profiles::calibration::Factors;

    /// Layouts whose work is known beforehand take no less, and where nothing waits no more; and no plan takes less
    /// time or memory than the floors of its layout.
    #[test]
    fn law_floors_are_below_what_they_bound() {
        let combined = "grad-reduce,param-gather,p2p,expert-alltoall";
        // Of a block by itself the floor knows how long the host is, not where the device waits for it.
        let no_host = 1e-9;
        for (name, gpus, global_batch, every, overlap, host, zero) in [
            ("mixtral-8x7b", 16, 32, 3, None, no_host, Zero::States),
            ("mixtral-8x7b", 16, 32, 5, None, 1.0, Zero::States),
            ("deepseek-v3", 256, 64, 97, None, no_host, Zero::States),
            ("deepseek-v3", 256, 64, 197, None, 1.0, Zero::States),
            (
                "qwen3-next-80b-a3b",
                32,
                32,
                17,
                None,
                no_host,
                Zero::States,
            ),
            // Its launches take longer than its work where ep is small.
            (
                "qwen3-30b-a3b",
                16,
                64,
                7,
                Some(combined),
                1.0,
                Zero::States,
            ),
            ("mixtral-8x7b", 16, 32, 5, None, no_host, Zero::Hybrid),
            ("mixtral-8x7b", 16, 32, 5, None, no_host, Zero::Fsdp2),
        ] {
            let model = &presets::load(name).expect("a preset");
            let cluster = &moefold_profiles::presets::cluster("dgx-h200").expect("a preset");
            let batch = Batch {
                seq_len: 4096,
                global_batch,
            };
            let options = &SearchOptions {
                top: 200,
                effort: Effort::Brief,
                overlap: overlap.map(|kinds| kinds.parse().expect("kinds")),
                zero,
                instances: if zero == Zero::Hybrid { 2 } else { 1 },
                grad_dtype: if zero == Zero::Fsdp2 {
                    Dtype::Bf16
                } else {
                    Dtype::F32
                },
                ..SearchOptions::new(batch, StackName::Megatron)
            };
            let costs = &Costs::for_cluster(cluster, &[]).times(Factors {
                host,
                ..Factors::default()
            });
            let rules = &Rules::of(model, options);
            let asked = Asked::new(model, cluster, gpus, options, costs, &Declared);
            let question = question(&asked, rules);
            let question = question.expect("legal");
            let question = &question;
            let layouts = candidates(
                std::slice::from_ref(question),
                (gpus, Variants::Few),
                rules,
                &unwatched,
            )
            .expect("unwatched")
            .layouts;
            let works = Works::new(question, layouts.iter(), &unwatched);
            let works = works.expect("unwatched");
            for layout in layouts.iter().step_by(every) {
                let known = works.of(question, layout);
                let shapes = Shapes::new(layout);
                for (known, shape) in known.iter().zip(shapes.first(question)) {
                    let whole = shape.work(question);
                    let near = |a: f64, b: f64| a <= b * (1.0 + 1e-9);
                    assert!(near(known.all_s, whole.all_s), "{name} {layout:?}");
                    assert!(
                        near(known.lightest_s, whole.lightest_s),
                        "{name} {layout:?}"
                    );
                    let exact = model.mtp.is_empty() && host <= no_host;
                    assert!(
                        !exact || near(whole.all_s, known.all_s),
                        "{name} {layout:?}"
                    );
                }
            }
            let found = plan(model, cluster, gpus, options, costs, &Declared).expect("feasible");
            let mut weights = Weights::new();
            for plan in &found.plans {
                let degrees = plan.layout.pinned().complete(gpus).expect("all");
                let layout = rules.layout(&degrees).expect("legal");
                let known = works.of(question, &layout);
                let floors = known.iter().map(|work| floor_s(question, &layout, work));
                let floor = floors.fold(f64::INFINITY, f64::min);
                assert!(floor <= plan.predicted.step_s, "{name} {layout:?}");
                let held = held(question, &layout, &mut weights).gib();
                let peak = plan.predicted.peak_gib;
                assert!(held <= peak && held > 0.05 * peak, "{name} {layout:?}");
            }
        }
    }
}
