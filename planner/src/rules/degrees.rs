//! [`Rules`]: what a model, a batch and options demand of degrees, gathered once and asked often.
//!
//! A search asks about millions of tuples, and a model has a hundred layers of two or three kinds;
//! so the distinct sizes that must divide are collected first.

use super::choices::Choices;
use crate::choice::ScheduleName;
use crate::layout::nearest::product;
use crate::layout::{Batch, Degrees, Illegal, Layout, MAX_PASSES, MAX_ROWS, PartialDegrees, grids};
use crate::model::{Ffn, Mixer, Model};
use crate::options::SearchOptions;

/// The longest sequence that is planned, several times the longest that was trained on.
pub(crate) const MOST_POSITIONS: u64 = 1 << 26;
/// The most sequences of a step.
const MOST_SEQUENCES: u64 = 1 << 22;
/// The most tokens of a step, a hundred times those of the largest runs.
pub(crate) const MOST_TOKENS: u64 = 1 << 34;

/// The sizes of a model and a batch that degrees must divide.
#[derive(Debug, Clone)]
pub struct Rules {
    batch: Batch,
    hidden: u64,
    layers: u64,
    heads: Vec<u64>,
    kv_heads: Vec<u64>,
    dense_widths: Vec<u64>,
    shared_widths: Vec<u64>,
    experts: Vec<u64>,
    expert_widths: Vec<u64>,
    /// Experts of a token, where it has most.
    topk: u64,
    /// How many times the rows of an expert are padded to at most.
    padding: u64,
    choices: Choices,
}

impl Rules {
    /// Gathers the sizes of a model's layers, MTP depths included, and what options demand.
    pub fn of(model: &Model, options: &SearchOptions) -> Self {
        Self {
            choices: Choices::of(model, options),
            padding: match options.capacity {
                Some(capacity) if capacity.pad => capacity.factor.ceil().max(1.0) as u64,
                _ => 1,
            },
            ..Self::new(model, &options.batch)
        }
    }

    /// The same of degrees alone, on a runtime without limits.
    ///
    /// The vocabulary is not among the sizes: it is padded to a multiple of TP.
    pub fn new(model: &Model, batch: &Batch) -> Self {
        let mut rules = Self {
            batch: *batch,
            hidden: model.hidden,
            layers: model.layers.len() as u64,
            heads: Vec::new(),
            kv_heads: Vec::new(),
            dense_widths: Vec::new(),
            shared_widths: Vec::new(),
            experts: Vec::new(),
            expert_widths: Vec::new(),
            topk: 0,
            padding: 1,
            choices: Choices::default(),
        };
        for layer in model.layers.iter().chain(&model.mtp) {
            match &layer.mixer {
                Some(Mixer::Gqa(gqa)) => {
                    rules.heads.push(gqa.heads);
                    rules.kv_heads.push(gqa.kv_heads);
                }
                Some(Mixer::Mla(mla)) => rules.heads.push(mla.heads),
                Some(Mixer::SharedKv(shared)) => rules.heads.push(shared.heads),
                Some(Mixer::Linear(linear)) => {
                    rules.heads.extend([linear.heads, linear.key_heads]);
                }
                None => {}
            }
            match &layer.ffn {
                Some(Ffn::Dense(mlp)) => rules.dense_widths.push(mlp.width),
                Some(Ffn::Moe(moe)) => {
                    rules.experts.push(moe.experts);
                    rules.expert_widths.push(moe.expert.width);
                    rules.topk = rules.topk.max(moe.topk);
                    rules
                        .shared_widths
                        .extend(moe.shared.iter().map(|shared| shared.mlp.width));
                }
                None => {}
            }
        }
        for sizes in [
            &mut rules.heads,
            &mut rules.kv_heads,
            &mut rules.dense_widths,
            &mut rules.shared_widths,
            &mut rules.experts,
            &mut rules.expert_widths,
        ] {
            sizes.sort_unstable();
            sizes.dedup();
        }
        rules
    }

    /// The batch they were gathered for.
    pub fn batch(&self) -> &Batch {
        &self.batch
    }

    /// Decoder layers of the model.
    pub fn layers(&self) -> u64 {
        self.layers
    }

    /// The same rules of degrees without what choices break among themselves.
    pub(crate) fn of_degrees(&self) -> Self {
        let mut rules = self.clone();
        rules.choices.broken.clear();
        rules
    }

    /// Proves degrees legal, or says every rule they break.
    ///
    /// Rules that speak of a derived number (replicas, microbatches) are asked only where that
    /// number exists; a zero is reported once, not again by every rule it would break.
    pub fn layout(&self, degrees: &Degrees) -> Result<Layout, Vec<Illegal>> {
        let mut broken = Vec::new();
        self.judge(degrees, false, &mut broken).ok_or(broken)
    }

    /// As [`Rules::layout`], the broken rules in place of what is in `broken`: who asks about every tuple of
    /// a space makes one list. Where the first is enough, others may be left out.
    pub(crate) fn judge(
        &self,
        degrees: &Degrees,
        first: bool,
        broken: &mut Vec<Illegal>,
    ) -> Option<Layout> {
        broken.clear();
        let grids = grids(degrees, broken);
        let microbatches = self.check(degrees, grids.map(|(dp, _)| dp), first, broken);
        match (grids, microbatches) {
            (Some(replicas), Some(microbatches)) if broken.is_empty() => {
                let layout = Layout::proven(degrees, replicas, microbatches);
                let layout = layout.numbered(self.choices.order)?;
                Some(match self.choices.schedule() {
                    Some(schedule) => layout.under(schedule),
                    None => layout,
                })
            }
            _ => None,
        }
    }

    /// Every rule that pinned degrees and choices break, whatever the open degrees are: a search
    /// over the rest would find nothing legal.
    pub fn contradictions(&self, pins: &PartialDegrees, gpus: u32) -> Vec<Illegal> {
        let d = pins.or_one(gpus);
        let mut broken = Vec::new();
        let grids = grids(&d, &mut broken);
        if let Some((dp, edp)) = grids {
            broken.extend(pins.misjudged_replicas(dp, edp));
        }
        let dp = pins.dp.filter(|&dp| dp > 0).or(grids.map(|(dp, _)| dp));
        self.check(&d, dp, false, &mut broken);
        broken.retain(|rule| rule.stays_broken(pins));
        broken
    }

    /// Adds every broken rule but those of the grids, and counts the microbatches.
    /// Where the `first` is enough, no more than the rest of its kind.
    fn check(
        &self,
        d: &Degrees,
        dp: Option<u32>,
        first: bool,
        broken: &mut Vec<Illegal>,
    ) -> Option<u32> {
        for (key, size) in [
            ("sequence length", self.batch.seq_len),
            ("global batch", self.batch.global_batch),
        ] {
            if size == 0 {
                broken.push(Illegal::Zero { key });
            }
        }
        let Batch {
            seq_len,
            global_batch,
        } = self.batch;
        let tokens = u128::from(seq_len) * u128::from(global_batch);
        for (key, found, most) in [
            ("sequence length", seq_len.into(), MOST_POSITIONS),
            ("global batch", global_batch.into(), MOST_SEQUENCES),
            ("tokens of a step", tokens, MOST_TOKENS),
        ] {
            if found > most.into() {
                broken.push(Illegal::Huge { key, found, most });
                return None;
            }
        }
        for check in [
            Self::check_tensor,
            Self::check_experts,
            Self::check_sequence,
            Self::check_rows,
        ] {
            if first && !broken.is_empty() {
                return None;
            }
            check(self, d, broken);
        }
        if first && !broken.is_empty() {
            return None;
        }
        let microbatches = dp.and_then(|dp| self.microbatches(d, dp, broken));
        self.check_pipeline(d, microbatches, broken);
        self.choices.check(d, broken);
        microbatches
    }

    fn check_tensor(&self, d: &Degrees, broken: &mut Vec<Illegal>) {
        let tp = d.tp;
        if tp <= 1 {
            return;
        }
        let uneven = |size: u64| !size.is_multiple_of(tp.into());
        let split = |sizes: &[u64], illegal: &dyn Fn(u64) -> Illegal, broken: &mut Vec<Illegal>| {
            broken.extend(sizes.iter().copied().filter(|&s| uneven(s)).map(illegal));
        };
        split(&self.heads, &|heads| Illegal::Heads { heads, tp }, broken);
        for &kv_heads in &self.kv_heads {
            if uneven(kv_heads) && !u64::from(tp).is_multiple_of(kv_heads) {
                broken.push(Illegal::KvHeads { kv_heads, tp });
            }
        }
        split(
            &[self.hidden],
            &|hidden| Illegal::Hidden { hidden, tp },
            broken,
        );
        split(
            &self.dense_widths,
            &|width| Illegal::DenseWidth { width, tp },
            broken,
        );
        split(
            &self.shared_widths,
            &|width| Illegal::SharedWidth { width, tp },
            broken,
        );
    }

    fn check_experts(&self, d: &Degrees, broken: &mut Vec<Illegal>) {
        if self.experts.is_empty() {
            for (key, degree) in [("ep", d.ep), ("etp", d.etp)] {
                if degree > 1 {
                    broken.push(Illegal::NoExperts { key, degree });
                }
            }
            return;
        }
        let (ep, etp) = (d.ep, d.etp);
        if ep > 1 {
            for &experts in &self.experts {
                if !experts.is_multiple_of(ep.into()) {
                    broken.push(Illegal::Experts { experts, ep });
                }
            }
        }
        if etp > 1 {
            for &width in &self.expert_widths {
                if !width.is_multiple_of(etp.into()) {
                    broken.push(Illegal::ExpertWidth { width, etp });
                }
            }
        }
    }

    fn check_sequence(&self, d: &Degrees, broken: &mut Vec<Illegal>) {
        let (seq_len, cp, tp) = (self.batch.seq_len, d.cp, d.tp);
        if seq_len == 0 || cp == 0 || tp == 0 {
            return;
        }
        if cp > 1 && !seq_len.is_multiple_of(2 * u64::from(cp)) {
            broken.push(Illegal::SequenceOverCp { seq_len, cp });
        } else if !(seq_len / u64::from(cp)).is_multiple_of(tp.into()) {
            broken.push(Illegal::SequenceOverTp { seq_len, cp, tp });
        }
    }

    /// Rows of the heads of all tokens of a rank, and of its experts where they are sent all tokens that there are.
    fn check_rows(&self, d: &Degrees, broken: &mut Vec<Illegal>) {
        let all = |sizes: &[u64]| sizes.iter().map(|&size| u128::from(size)).product::<u128>();
        let cut = all(&[d.cp.into(), d.tp.into()]).max(1);
        let tokens = all(&[self.batch.seq_len, d.mbs.into()]);
        let heads = self.heads.last().copied().unwrap_or(1);
        let sent = all(&[d.ep.into(), d.etp.into(), self.topk, self.padding]);
        for (what, each) in [("of heads", heads.into()), ("of experts", sent)] {
            let rows = tokens.saturating_mul(each) / cut;
            if rows > MAX_ROWS.into() {
                broken.push(Illegal::Rows { what, rows });
            }
        }
    }

    fn microbatches(&self, d: &Degrees, dp: u32, broken: &mut Vec<Illegal>) -> Option<u32> {
        let global_batch = self.batch.global_batch;
        if global_batch == 0 || d.mbs == 0 {
            return None;
        }
        let samples = product(&[d.mbs, dp]);
        if !global_batch.is_multiple_of(samples) {
            broken.push(Illegal::GlobalBatch {
                global_batch,
                mbs: d.mbs,
                dp,
            });
            return None;
        }
        let microbatches = global_batch / samples;
        let stages = product(&[d.pp, d.vpp]);
        if microbatches.saturating_mul(stages) > MAX_PASSES.into() {
            broken.push(Illegal::Microbatches {
                microbatches,
                stages,
            });
            return None;
        }
        Some(microbatches as u32)
    }

    /// Megatron-Core counts the embedding and the head as layers where it is asked to
    /// (`account_for_embedding_in_pipeline_split` and `account_for_loss_in_pipeline_split`, `get_num_layers_to_build`
    /// in `transformer_block.py`), so the first and the last stage may have no other; and a layout that is given may
    /// leave any stage empty (`validate_layer_layout` in `pipeline_parallel_layer_layout.py` counts layers alone, and
    /// a block without layers passes on what it gets).
    fn check_pipeline(&self, d: &Degrees, microbatches: Option<u32>, broken: &mut Vec<Illegal>) {
        let (pp, vpp) = (d.pp, d.vpp);
        if pp == 0 || vpp == 0 {
            return;
        }
        if product(&[pp, vpp]) > self.layers + 2 && !self.choices.gives_stages() {
            broken.push(Illegal::EmptyStages {
                layers: self.layers,
                pp,
                vpp,
            });
        }
        if vpp == 1 {
            return;
        }
        // Those that come back take any number.
        let schedule = self.choices.schedule();
        let comes_back = schedule.is_some_and(ScheduleName::is_vee);
        if pp == 1 {
            broken.push(Illegal::InterleavedAlone { vpp });
        } else if let Some(microbatches) = microbatches.filter(|m| !m.is_multiple_of(pp))
            && !comes_back
        {
            broken.push(Illegal::InterleavedGroups {
                vpp,
                microbatches,
                pp,
            });
        }
    }
}

impl Layout {
    /// Proves degrees legal for a model and a batch, or says every rule they break.
    ///
    /// A search that asks many times keeps the [`Rules`].
    pub fn new(degrees: &Degrees, model: &Model, batch: &Batch) -> Result<Self, Vec<Illegal>> {
        Rules::new(model, batch).layout(degrees)
    }

    /// The same under a schedule, where the layers of so many stages are given: any of them may be empty.
    pub fn of_stages(
        degrees: &Degrees,
        (schedule, stages): (ScheduleName, usize),
        model: &Model,
        batch: &Batch,
    ) -> Result<Self, Vec<Illegal>> {
        let mut rules = Rules::new(model, batch);
        rules.choices.give_stages(schedule, stages);
        rules.layout(degrees)
    }
}
