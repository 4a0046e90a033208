//! [`Breakdown`]: what a list of work costs, by category; [`Busy`]: how long each op takes, by how its prices are known.
//!
//! Prices come from [`Costs`]; exposure rules from the stack. A breakdown is exposed time on the device's
//! compute stream: communication that runs beside compute appears only with its excess.

use std::collections::BTreeMap;

use moefold_profiles::pricing::{Costs, Exchange, Waiting};
use moefold_profiles::trace::Category;
use moefold_profiles::units::{Bytes, Seconds};
use moefold_profiles::{Collective, CollectiveKind, Cost, Op, Pass, Source};

use crate::choice::GraphModule;
use crate::runtime::{Lowered, Part, Task, Work};
use crate::stack::Stack;
use crate::stack::host::{Issue, Queues};

const CATEGORIES: usize = Category::ALL.len();

/// Exposed seconds of some work.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Breakdown {
    by_category: [f64; CATEGORIES],
    /// Seconds that the host takes to issue it, and that the device waits for that.
    host_s: [f64; 2],
    /// Seconds in which the rank meets no others, where all of it is.
    apart: f64,
    /// Seconds of products and attention.
    bound_by_sms: f64,
}

impl Breakdown {
    /// Adds a price.
    pub fn add(&mut self, category: Category, cost: Cost) {
        self.by_category[category as usize] += cost.time.0;
    }

    /// Adds another breakdown.
    pub fn merge(&mut self, other: &Self) {
        for (mine, theirs) in self.by_category.iter_mut().zip(other.by_category) {
            *mine += theirs;
        }
        for (mine, theirs) in self.host_s.iter_mut().zip(other.host_s) {
            *mine += theirs;
        }
        self.apart += other.apart;
        self.bound_by_sms += other.bound_by_sms;
    }

    /// Seconds of pieces of work that meet no other ranks: how far ranks drift apart in them shows at the
    /// next collective after.
    pub fn apart(&self) -> f64 {
        self.apart
    }

    /// Seconds of products and attention, which are slower where something else holds multiprocessors. What memory bounds
    /// is taken to need fewer than are left.
    pub fn bound_by_sms(&self) -> f64 {
        self.bound_by_sms
    }

    /// Seconds that the host takes to issue it.
    pub fn issued_s(&self) -> f64 {
        self.host_s[0]
    }

    /// Time on the device.
    pub fn device(&self) -> f64 {
        self.by_category.iter().sum()
    }

    /// What the host adds: of Megatron-Core what its queue and the device's give, piece by piece; of this project's
    /// executor, which asks for ops far ahead, what all of it takes longer than the device, and where nothing hides it
    /// all of it.
    pub fn host_excess(&self, stack: &Stack) -> f64 {
        match stack {
            Stack::Megatron(_) => self.host_s[1],
            Stack::Moefold(_) => stack.host_excess(self.host_s[0], self.device()),
        }
    }

    /// Time of one category.
    pub fn get(&self, category: Category) -> f64 {
        self.by_category[category as usize]
    }
}

/// Breakdowns of the two passes of one layer, and what running each part again costs.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct LayerBreakdown {
    /// Forward.
    pub forward: Breakdown,
    /// Backward without recomputation.
    pub backward: Breakdown,
    /// What of it only adds to gradients of weights.
    pub weight: Breakdown,
    /// Of the forward pass, done again.
    again: Vec<Again>,
    /// By recompute set, what the device waits for the host in all that is done again under it.
    again_waits_s: Vec<f64>,
}

/// What is done again together; all of it is [`Category::Recompute`].
#[derive(Debug, Clone, Copy, PartialEq)]
struct Again {
    /// The recompute sets under which it is, as bits.
    sets: u64,
    seconds: f64,
    bound_by_sms: f64,
    issued_s: f64,
}

impl LayerBreakdown {
    /// Prices a lowered layer.
    pub fn new(lowered: &Lowered, costs: &Costs, stack: &Stack) -> Self {
        let priced: Vec<(u64, Vec<(&Work, Cost)>)> = (lowered.again.iter())
            .map(|again| {
                // Communication beside the core is hidden again when the core runs again.
                let all = again.work.iter();
                let seen = all.filter(|work| work.beside != Some(Part::Core));
                let priced = seen.map(|work| (work, cost_of(work, costs)));
                (again.sets, priced.collect())
            })
            .collect();
        let host = |all: &mut dyn Iterator<Item = &(&Work, Cost)>| {
            let mut host = Host::new(&lowered.forward, stack);
            for &(work, cost) in all {
                host.issues(work, cost);
            }
            host.seconds(false)
        };
        let again = priced.iter().map(|(sets, all)| {
            let [issued_s, _] = host(&mut all.iter());
            Again {
                sets: *sets,
                seconds: all.iter().map(|(_, cost)| cost.time.0).sum(),
                bound_by_sms: all
                    .iter()
                    .map(|(work, cost)| bound_by_sms(work, *cost))
                    .sum(),
                issued_s,
            }
        });
        let any = priced.iter().fold(0, |any, (sets, _)| any | sets);
        let waits_s = (0..u64::BITS - any.leading_zeros()).map(|set| {
            let under = priced.iter().filter(|(sets, _)| sets >> set & 1 == 1);
            let [_, waits_s] = host(&mut under.flat_map(|(_, all)| all));
            waits_s
        });
        let mut weight = Breakdown::default();
        let backward = price(&lowered.backward, costs, stack, |work, cost| {
            if work.of_weights {
                weight.add(work.category, cost);
                weight.host_s[0] += launches(work) * stack.common().launch.0;
            }
        });
        Self {
            forward: price(&lowered.forward, costs, stack, |_, _| {}),
            backward,
            weight,
            again: again.collect(),
            again_waits_s: waits_s.collect(),
        }
    }

    /// The backward pass under a recompute set, by its index: what runs again first.
    pub fn backward_under(&self, set: usize) -> Breakdown {
        let mut breakdown = self.backward;
        for again in self.again.iter().filter(|again| again.sets >> set & 1 == 1) {
            breakdown.by_category[Category::Recompute as usize] += again.seconds;
            breakdown.host_s[0] += again.issued_s;
            breakdown.bound_by_sms += again.bound_by_sms;
        }
        breakdown.host_s[1] += self.again_waits_s.get(set).unwrap_or(&0.0);
        breakdown
    }
}

/// The price of one piece of work.
pub fn cost_of(work: &Work, costs: &Costs) -> Cost {
    match work.task {
        Task::Op(op) => costs.op(&op),
        Task::Collective(collective) => costs.collective(&collective),
        Task::Exchange {
            kernel,
            local,
            remote,
            copied,
            group,
        } => costs.exchange(&Exchange {
            kernel,
            local,
            remote,
            copied,
            ranks: group.ranks,
            ranks_per_domain: group.ranks_per_domain,
        }),
        Task::Transfer { bytes, leaves } => costs.transfer(bytes, leaves),
        Task::HostRead => Cost {
            time: Seconds::ZERO,
            source: Source::Measured,
        },
    }
}

/// Prices a list of work. `each` sees every piece with its full price, hidden or not.
pub fn price(
    list: &[Work],
    costs: &Costs,
    stack: &Stack,
    mut each: impl FnMut(&Work, Cost),
) -> Breakdown {
    let mut breakdown = Breakdown::default();
    let (mut core, mut shared) = (Hidden::default(), Hidden::default());
    let mut drift = Drift::default();
    let mut host = Host::new(list, stack);
    let mut transfers = Transfers::default();
    let backward = is_backward(list);
    let mut products = Hidden::default();
    // Blocks of attention follow one another, all alike.
    let mut last: Option<(&Task, Cost)> = None;
    for work in list {
        let cost = match last {
            Some((task, cost)) if *task == work.task => cost,
            _ => cost_of(work, costs),
        };
        last = Some((&work.task, cost));
        if let Task::Transfer { leaves, .. } = work.task {
            each(work, cost);
            host.issues(
                work,
                Cost {
                    time: Seconds::ZERO,
                    ..cost
                },
            );
            transfers.add(cost, leaves, breakdown.device());
            continue;
        }
        drift.add(work, cost, costs);
        each(work, cost);
        let cost = match beside_products(work, cost, stack) {
            Some(([seen, hidden], sms)) => {
                products.hide(work, hidden, costs.share_of_sms(sms));
                seen
            }
            None => cost,
        };
        breakdown.bound_by_sms += bound_by_sms(work, cost);
        host.issues(work, cost);
        breakdown.by_category[Category::Host as usize] += host_wait(work, stack);
        match work.beside {
            Some(Part::Shared) => {
                // The exchange back begins when that there is done.
                if shared.cover > 0.0 {
                    std::mem::take(&mut shared).show(&mut breakdown);
                }
                shared.hide(work, cost, stack.taken_by_exchanges());
                continue;
            }
            Some(_) => {
                // What rings of context-parallel ranks take is left out.
                core.hide(work, cost, 0.0);
                // Of a whole ring of blocks the last one has nothing beside it.
                if let Task::Collective(ring) = &work.task
                    && ring.kind != CollectiveKind::SendRecv
                {
                    core.uncovered = 1.0 / f64::from(ring.ranks.max(1));
                }
                continue;
            }
            None => {}
        }
        match (work.part, &work.task) {
            (Some(Part::Core), _) => core.cover += cost.time.0,
            (_, Task::Op(Op::Gemm { .. })) if is_of_products(work, stack) => {
                products.cover += cost.time.0;
            }
            // This project's executor has a stream for tokens, beside which other collectives go on.
            (Some(Part::Shared), task)
                if shared.work.is_some()
                    && (matches!(task, Task::Op(_)) || matches!(stack, Stack::Moefold(_))) =>
            {
                shared.cover += cost.time.0;
            }
            _ => {}
        }
        breakdown.add(work.category, cost);
    }
    core.show(&mut breakdown);
    shared.show(&mut breakdown);
    products.show(&mut breakdown);
    if let Some(exposed) = transfers.exposed(breakdown.device()) {
        breakdown.add(Category::Offload, exposed);
    }
    breakdown.by_category[Category::Waiting as usize] += drift.waited_s();
    breakdown.apart += drift.unmet_s();
    breakdown.host_s = host.seconds(backward);
    breakdown
}

/// Seconds of a piece of work that are bound by multiprocessors.
fn bound_by_sms(work: &Work, cost: Cost) -> f64 {
    match work.task {
        Task::Op(op) if op.is_bound_by_sms() => cost.time.0,
        _ => 0.0,
    }
}

/// Seconds that compute of `alone_s` takes longer beside collectives that go on for `beside_s` from its start on: these take a share of its
/// multiprocessors, less than all, and until they end it has the rest.
pub(crate) fn slower(alone_s: f64, beside_s: f64, taken: f64) -> f64 {
    taken * beside_s.max(0.0).min(alone_s / (1.0 - taken))
}

/// The same with what then shows of the collectives, where it waits for them.
pub(crate) fn lengthened(alone_s: f64, beside_s: f64, taken: f64) -> f64 {
    f64::max(beside_s - alone_s, beside_s.max(0.0) * taken)
}

/// Of a tensor-parallel collective that runs beside the product before or behind it, what shows and what that hides, if
/// it is long enough, and the multiprocessors that it takes. Both are cut into a chunk a rank, and beside the first chunk,
/// or the last, is nothing (Transformer Engine, `--tp-comm-overlap`: rings of user buffers).
fn beside_products(work: &Work, cost: Cost, stack: &Stack) -> Option<([Cost; 2], f64)> {
    let Task::Collective(Collective { kind, ranks, .. }) = work.task else {
        return None;
    };
    let is_cut = matches!(
        kind,
        CollectiveKind::AllGather | CollectiveKind::ReduceScatter
    );
    if work.category != Category::TpComm || !is_cut || !is_of_products(work, stack) {
        return None;
    }
    let seen = 1.0 / f64::from(ranks.max(1));
    let parts = [seen, 1.0 - seen].map(|share| Cost {
        time: Seconds(share * cost.time.0),
        ..cost
    });
    Some((parts, stack.sms_beside_products(kind)))
}

/// Whether a piece of work is of linear layers whose collectives run beside their products: those of decoder layers,
/// not of experts.
fn is_of_products(work: &Work, stack: &Stack) -> bool {
    let of_layers = matches!(
        work.part,
        Some(Part::Projection | Part::UpProjection | Part::Output | Part::Mlp)
    );
    of_layers && matches!(stack, Stack::Megatron(stack) if stack.tp_beside)
}

/// Whether a list is of a backward pass; those of declared work stand in the order of the forward pass.
fn is_backward(list: &[Work]) -> bool {
    list.iter().any(|work| {
        matches!(work.task, Task::Op(op) if op.pass().is_some_and(|pass| pass != Pass::Forward))
    })
}

/// Communication beside ops, of which the excess shows, and what the rest takes from these.
#[derive(Debug, Clone, Copy, Default)]
struct Hidden {
    work: Option<(Category, f64, Source)>,
    /// Seconds of it times the share of multiprocessors that it takes.
    taken: f64,
    /// Seconds of the ops.
    cover: f64,
    /// The share of them that hides nothing.
    uncovered: f64,
}

impl Hidden {
    fn hide(&mut self, work: &Work, cost: Cost, taken: f64) {
        let (_, time, source) = (self.work).unwrap_or((work.category, 0.0, Source::Measured));
        self.work = Some((work.category, time + cost.time.0, source.max(cost.source)));
        self.taken += taken * cost.time.0;
    }

    fn show(self, breakdown: &mut Breakdown) {
        if let Some((category, time, source)) = self.work {
            let cover = self.cover * (1.0 - self.uncovered);
            let taken = if time > 0.0 { self.taken / time } else { 0.0 };
            let time = Seconds(lengthened(cover, time, taken));
            breakdown.add(category, Cost { time, source });
        }
    }
}

/// Copies to and from the host: each beside the work of the block after its own, or before it where it comes
/// back. What a list begins with comes after the end of one like it, as layers do.
#[derive(Debug, Default)]
struct Transfers {
    /// Each with what was priced before it, in seconds.
    all: Vec<(Cost, f64)>,
    leave: bool,
}

impl Transfers {
    fn add(&mut self, cost: Cost, leaves: bool, before_s: f64) {
        self.all.push((cost, before_s));
        self.leave = leaves;
    }

    /// What the work beside them does not hide, where there are any; `end_s` is that of the list.
    fn exposed(&self, end_s: f64) -> Option<Cost> {
        let (first, _) = self.all.first()?;
        let blocks = self.all.len();
        let ends = |block: usize| match self.all.get(block) {
            Some((_, before_s)) => *before_s,
            None => end_s,
        };
        // Work of each block, which stands before its copy where that leaves and behind it where it comes back.
        let work_s = |block: usize| match (self.leave, block) {
            (true, 0) => ends(0),
            (true, _) => ends(block) - ends(block - 1),
            (false, _) => ends(block + 1) - ends(block),
        };
        let shift = if self.leave { 1 } else { blocks - 1 };
        let beside = |block: usize| (block + shift) % blocks;
        let mut exposed = Cost {
            time: Seconds::ZERO,
            ..*first
        };
        for (block, (cost, _)) in self.all.iter().enumerate() {
            exposed.time += Seconds((cost.time.0 - work_s(beside(block))).max(0.0));
            exposed.source = exposed.source.max(cost.source);
        }
        Some(exposed)
    }
}

/// How long ranks wait for the last of them at the collectives of a list of work ([`Costs::waiting`]). What a list begins
/// with comes after the end of one like it, as layers do.
#[derive(Debug, Default)]
struct Drift {
    waited: f64,
    /// Of the first collective.
    first: Option<Waiting>,
    since: f64,
}

impl Drift {
    fn add(&mut self, work: &Work, cost: Cost, costs: &Costs) {
        if let Task::Collective(collective) = &work.task {
            let waiting = costs.waiting(collective);
            self.first.get_or_insert(waiting);
            self.waited += waiting.after(std::mem::take(&mut self.since));
        }
        self.since += cost.time.0;
    }

    fn waited_s(&self) -> f64 {
        self.waited + self.first.map_or(0.0, |first| first.share * self.since)
    }

    /// All of it, where ranks do not meet.
    fn unmet_s(&self) -> f64 {
        if self.first.is_none() {
            self.since
        } else {
            0.0
        }
    }
}

/// What the host does for a list of work.
struct Host<'a> {
    stack: &'a Stack,
    mixer: GraphModule,
    queues: Queues,
    issued_s: f64,
}

impl<'a> Host<'a> {
    fn new(list: &[Work], stack: &'a Stack) -> Self {
        Self {
            stack,
            mixer: Issue::mixer(list),
            queues: Queues::default(),
            issued_s: 0.0,
        }
    }

    fn issues(&mut self, work: &Work, cost: Cost) {
        match self.stack {
            Stack::Megatron(stack) => {
                let reads = matches!(work.task, Task::HostRead) && stack.issue.reads();
                let read_s = reads.then_some(stack.common.sync.0);
                let device_s = if work.beside.is_none() {
                    cost.time.0
                } else {
                    0.0
                };
                let issued_s = stack.issue.seconds(work, self.mixer);
                self.issued_s += issued_s;
                self.queues.push(issued_s, device_s, read_s);
            }
            Stack::Moefold(stack) => self.issued_s += launches(work) * stack.common.launch.0,
        }
    }

    /// What it takes, and what the device waits for it.
    fn seconds(&self, backward: bool) -> [f64; 2] {
        [self.issued_s, self.queues.waits_s(backward)]
    }
}

/// Kernels that this project's executor launches.
fn launches(work: &Work) -> f64 {
    match &work.task {
        Task::HostRead | Task::Transfer { .. } => 0.0,
        // Round a ring.
        Task::Collective(ring) if work.beside == Some(Part::Core) => {
            f64::from(ring.ranks.saturating_sub(1))
        }
        Task::Op(_) | Task::Collective(_) | Task::Exchange { .. } => 1.0,
    }
}

/// Seconds that the device idles while the host of this project's executor waits for it; of Megatron-Core that
/// is in what its queue gives.
fn host_wait(work: &Work, stack: &Stack) -> f64 {
    match (&work.task, stack) {
        (Task::HostRead, Stack::Moefold(stack)) => stack.common.sync.0,
        _ => 0.0,
    }
}

/// The stem of a piece of work in traces and tables.
pub fn stem(work: &Work) -> &'static str {
    match work.task {
        Task::Op(op) => op.stem(),
        Task::Collective(collective) => collective.kind.stem(),
        Task::Exchange { .. } => "all_to_all",
        Task::HostRead => "counts_to_host",
        Task::Transfer { .. } => "host_copy",
    }
}

/// How long an op or collective keeps a rank busy in a step, hidden parts included.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Busy {
    /// All calls together, by how their prices are known, in the order of [`Source::ALL`].
    pub by_source_s: [f64; Source::ALL.len()],
    /// How many.
    pub calls: f64,
}

impl Busy {
    /// Adds calls that cost so much each.
    pub fn add(&mut self, each: Cost, calls: f64) {
        self.by_source_s[each.source as usize] += each.time.0 * calls;
        self.calls += calls;
    }

    /// All calls together.
    pub fn seconds(&self) -> f64 {
        self.by_source_s.iter().sum()
    }
}

/// By stem.
pub type BusyByStem = BTreeMap<String, Busy>;

/// Adds a list of work, `times` over.
pub fn add_busy<'a>(
    busy: &mut BusyByStem,
    list: impl IntoIterator<Item = &'a Work>,
    costs: &Costs,
    times: f64,
) {
    // What the host waits is no time of an op.
    let timed = |work: &&Work| match work.task {
        Task::HostRead => false,
        Task::Transfer { bytes, .. } => bytes > Bytes::ZERO,
        _ => true,
    };
    for work in list.into_iter().filter(timed) {
        let cost = cost_of(work, costs);
        if let Some(total) = busy.get_mut(stem(work)) {
            total.add(cost, times);
        } else {
            let mut total = Busy::default();
            total.add(cost, times);
            busy.insert(stem(work).to_owned(), total);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::choice::{Graphs, Module, Recompute, StackName};
    use crate::layout::{Batch, Layout, PartialDegrees};
    use crate::local::Local;
    use crate::model::presets;
    use crate::runtime::{LayerGroups, Piece, Runtime as _, Setting};
    use crate::stack::megatron::Declared;

    /// Of two blocks, each copy beside the other's work: 5 beside 3 and 1 beside 4 forward, and back beside what
    /// runs before.
    #[test]
    fn golden_copies_are_hidden_by_the_block_beside_them() {
        let cost = |seconds: f64| Cost {
            time: Seconds(seconds),
            source: Source::Measured,
        };
        let exposed = |leave, copies: [(f64, f64); 2], end_s| {
            let mut transfers = Transfers::default();
            for (copy_s, before_s) in copies {
                transfers.add(cost(copy_s), leave, before_s);
            }
            transfers.exposed(end_s).map(|cost| cost.time.0)
        };
        // Work of 4, copy of 5, work of 3, copy of 1.
        assert_eq!(exposed(true, [(5.0, 4.0), (1.0, 7.0)], 7.0), Some(2.0));
        // Copy of 6, work of 3, copy of 5, work of 4: the first is beside the last of the layer after.
        assert_eq!(exposed(false, [(6.0, 0.0), (5.0, 3.0)], 7.0), Some(4.0));
        assert_eq!(Transfers::default().exposed(7.0), None);
    }

    #[test]
    fn law_what_runs_again_is_added_to_backward() {
        let model = presets::load("mixtral-8x7b").expect("a preset");
        let cluster = moefold_profiles::presets::cluster("dgx-h100").expect("a preset");
        let batch = Batch {
            seq_len: 4096,
            global_batch: 32,
        };
        let degrees: PartialDegrees = "tp=2,cp=2,pp=1,ep=4,etp=2,mbs=1".parse().expect("degrees");
        let layout = Layout::new(&degrees.or_one(16), &model, &batch).expect("legal");
        let local = Local::new(&layout, &model, &batch, 1.0);
        let groups = LayerGroups::new(&layout, &cluster);
        let setting = Setting::plain(&model, &layout, &local, &groups);
        let costs = Costs::for_cluster(&cluster, &[]);
        let sets = [
            Recompute::None,
            Recompute::of(vec![Module::Moe, Module::Layernorm]),
            Recompute::Full,
        ];
        let lowered = Declared.work(&setting, Piece::Layer(&model.layers[0]), &sets);
        let layer = LayerBreakdown::new(&lowered, &costs, &Stack::of(StackName::Megatron));
        let plain = layer.backward_under(0);
        for (index, set) in sets.into_iter().enumerate() {
            let backward = layer.backward_under(index);
            let again = backward.get(Category::Recompute);
            assert_eq!(again > 0.0, set != Recompute::None, "{set:?}");
            let work = |passes: &Breakdown| passes.device() - passes.get(Category::Host);
            let (all, more) = (work(&backward), work(&backward) - work(&plain));
            assert!((more - again).abs() <= 1e-12 * all, "{set:?}");
        }
    }

    /// Of collectives of two tensor-parallel ranks half shows, and the other half where products are shorter.
    #[test]
    fn law_tensor_parallel_collectives_hide_under_products() {
        let model = presets::load("mixtral-8x7b").expect("a preset");
        let mut cluster = moefold_profiles::presets::cluster("dgx-h100").expect("a preset");
        let batch = Batch {
            seq_len: 4096,
            global_batch: 32,
        };
        let degrees: PartialDegrees = "tp=2,cp=1,pp=1,ep=8,etp=1,mbs=1".parse().expect("degrees");
        let layout = Layout::new(&degrees.or_one(16), &model, &batch).expect("legal");
        let beside = crate::choice::Overlap {
            tp: true,
            ..crate::choice::Overlap::default()
        };
        let stack = Stack::of(StackName::Megatron);
        let hides = stack.clone().under(Graphs::NONE, Some(beside));
        for slower in [1.0, 100.0] {
            cluster.gpu.nvlink_gb_per_s = 450.0 / slower;
            let local = Local::new(&layout, &model, &batch, 1.0);
            let groups = LayerGroups::new(&layout, &cluster);
            let setting = Setting::plain(&model, &layout, &local, &groups);
            let costs = Costs::for_cluster(&cluster, &[]);
            let layer = Declared.work(&setting, Piece::Layer(&model.layers[0]), &[]);
            for list in [layer.forward, layer.backward] {
                let (mut sent, mut products, mut taken) = (0.0, 0.0, 0.0);
                for work in &list {
                    let seconds = cost_of(work, &costs).time.0;
                    match work.task {
                        Task::Collective(of) if work.category == Category::TpComm => {
                            sent += seconds;
                            // 1 and 16 of the 132 multiprocessors of an H100.
                            let scatters = of.kind == CollectiveKind::ReduceScatter;
                            taken += seconds * if scatters { 16.0 } else { 1.0 } / 132.0;
                        }
                        Task::Op(Op::Gemm { .. }) if work.category == Category::Attention => {
                            products += seconds;
                        }
                        _ => {}
                    }
                }
                assert!(sent > 0.0 && products > 0.0);
                let found = price(&list, &costs, &hides, |_, _| {}).get(Category::TpComm);
                let exposed = (sent / 2.0 - products).max(0.0);
                let hidden = (sent / 2.0 - exposed) / (sent / 2.0);
                let expected = sent / 2.0 + f64::max(exposed, hidden * taken / 2.0);
                assert!((found - expected).abs() < 1e-12, "{found} {expected}");
                let plain = price(&list, &costs, &stack, |_, _| {}).get(Category::TpComm);
                assert!((plain - sent).abs() < 1e-12, "{plain} {sent}");
            }
        }
    }

    /// Each exchange hides under the half of the shared expert that follows it, and no more of it than that.
    #[test]
    fn law_each_exchange_hides_under_its_half_of_the_shared_expert() {
        let model = presets::load("deepseek-v2-lite").expect("a preset");
        let cluster = moefold_profiles::presets::cluster("dgx-h100").expect("a preset");
        let batch = Batch {
            seq_len: 4096,
            global_batch: 32,
        };
        let costs = Costs::for_cluster(&cluster, &[]);
        let stack = Stack::of(StackName::Megatron);
        for ep in [8, 32] {
            let degrees: PartialDegrees = format!("tp=1,pp=1,ep={ep},etp=1,mbs=1")
                .parse()
                .expect("degrees");
            let layout = Layout::new(&degrees.or_one(32), &model, &batch).expect("legal");
            let local = Local::new(&layout, &model, &batch, 1.0);
            let groups = LayerGroups::new(&layout, &cluster);
            let setting = |shared_beside| Setting {
                shared_beside,
                ..Setting::plain(&model, &layout, &local, &groups)
            };
            let piece = Piece::Layer(&model.layers[1]);
            let [apart, beside] =
                [false, true].map(|on| Declared.work(&setting(on), piece, &[]).forward);
            assert_eq!(apart.len(), beside.len(), "the same work in another order");
            // One half after the other, by hand.
            let mut exposed = 0.0;
            let mut halves = Vec::new();
            for work in &beside {
                let seconds = cost_of(work, &costs).time.0;
                if work.beside == Some(Part::Shared) {
                    halves.push((seconds, 0.0));
                } else if let (Some(Part::Shared), Task::Op(_)) = (work.part, &work.task) {
                    halves.last_mut().expect("an exchange before it").1 += seconds;
                }
            }
            assert_eq!(halves.len(), 2);
            for (sent, cover) in halves {
                assert!(cover > 0.0);
                // What is hidden takes a fifth of what hides it, which then hides more.
                exposed += f64::max(sent - cover, 0.2 * f64::min(sent, cover));
            }
            let priced = price(&beside, &costs, &stack, |_, _| {});
            let found = priced.get(Category::EpComm);
            assert!((found - exposed).abs() < 1e-12, "{found} {exposed}");
            assert!(found < price(&apart, &costs, &stack, |_, _| {}).get(Category::EpComm));
        }
    }
}
