//! [`keys`]: every op and collective that ranks run under a layout, as keys of the cost tables.
//!
//! What to measure so that a plan's price rests on measurements. The shapes are those that pricing
//! looks up, since both come from the same lowering.

use moefold_profiles::directory::Key;
use moefold_profiles::{Cluster, Dtype, Precision};

use super::ends::{self, Held, StepGroups};
use crate::bucket::Division;
use crate::choice::{Capacity, CpComm, Dispatcher, HostShare, Masters, Optimizer};
use crate::layout::{Batch, Layout};
use crate::local::Local;
use crate::mesh::{GroupKind, Mesh, placement};
use crate::model::{Layer, Model};
use crate::runtime::{LayerGroups, Lowered, Setting, Task};
use crate::runtime::{Piece, Runtime};
use crate::shard::{self, Shard};

/// The job whose keys are wanted.
#[derive(Debug, Clone, Copy)]
pub struct Job<'a> {
    /// The model.
    pub model: &'a Model,
    /// Where it runs.
    pub cluster: &'a Cluster,
    /// Sequence length and global batch.
    pub batch: &'a Batch,
    /// The recipe.
    pub precision: Precision,
    /// How tokens travel.
    pub dispatcher: Dispatcher,
    /// How attention reaches the keys of other context-parallel ranks.
    pub cp_comm: CpComm,
    /// How many of them an expert takes.
    pub capacity: Option<Capacity>,
    /// What updates the weights.
    pub optimizer: Optimizer,
    /// What is kept of f32 masters.
    pub masters: Masters,
    /// How much of the optimizer's state rests on the host.
    pub optimizer_offload: HostShare,
    /// How weights are divided into buckets, each of which is reduced and updated by itself.
    pub division: Division,
    /// What runs it.
    pub runtime: &'a dyn Runtime,
}

/// The distinct keys of a layout, in the order of keys. Every pipeline rank is taken to hold as many layers, one after
/// the other; other stages change no shape but those of the end of a step.
pub fn keys(job: &Job<'_>, layout: &Layout) -> Vec<Key> {
    let local = Local::new(layout, job.model, job.batch, 1.0).within(job.model, job.capacity);
    let groups = LayerGroups::new(layout, job.cluster);
    let setting = Setting {
        precision: job.precision,
        dispatcher: job.dispatcher,
        cp_comm: job.cp_comm,
        capacity: job.capacity,
        // The same is run, in whatever order.
        ..Setting::plain(job.model, layout, &local, &groups)
    };
    let mut found = Vec::new();
    let mut seen: Vec<&Layer> = Vec::new();
    for layer in &job.model.layers {
        if !seen.contains(&layer) {
            seen.push(layer);
            collect(
                &mut found,
                &job.runtime.work(&setting, Piece::Layer(layer), &[]),
            );
        }
    }
    for end in [Piece::Embedding, Piece::Head] {
        collect(&mut found, &job.runtime.work(&setting, end, &[]));
    }
    step_keys(&mut found, job, layout, &local);
    found.sort_unstable();
    found.dedup();
    found
}

fn collect(found: &mut Vec<Key>, lowered: &Lowered) {
    for work in lowered.forward.iter().chain(&lowered.backward) {
        match work.task {
            Task::Op(op) => found.push(Key::Op(op)),
            Task::Collective(collective) => found.push(Key::Collective(collective)),
            // A fused exchange is priced by its bytes alone, a read by the host: they have no key.
            Task::Exchange { .. } | Task::HostRead | Task::Transfer { .. } => {}
        }
    }
}

fn step_keys(found: &mut Vec<Key>, job: &Job<'_>, layout: &Layout, local: &Local) {
    let layers: Vec<Shard> = (job.model.layers.iter())
        .map(|layer| shard::layer(job.model, layer, local))
        .collect();
    let each = layers.len().div_ceil(layout.pp() as usize).max(1);
    let mut ranks: Vec<Vec<Shard>> = layers.chunks(each).map(<[Shard]>::to_vec).collect();
    let table = shard::embedding(job.model, local);
    let mut head = shard::head(job.model, local);
    if job.model.tied_embeddings && layout.pp() == 1 {
        head = head.without(table);
    }
    ranks[0].insert(0, table);
    ranks.last_mut().expect("there is one").push(head);
    let of = |kind| placement(layout, kind, job.cluster);
    let groups = StepGroups {
        dp_cp: of(GroupKind::DpCp),
        across: None,
        outer: 1,
        edp: of(GroupKind::Edp),
        tp: of(GroupKind::Tp),
    };
    let weights = job.precision.activation();
    let dtypes = [Dtype::F32, weights, job.optimizer.moments()];
    for units in ranks {
        let buckets =
            [Shard::dense, |shard: &Shard| shard.experts].map(|own: fn(&Shard) -> u64| {
                let elements: Vec<u64> = units.iter().map(own).collect();
                job.division.buckets(&elements)
            });
        let held = Held::of(units, buckets.each_ref().map(Vec::as_slice), true);
        let states = (job.masters, job.optimizer_offload);
        let work = ends::step(&held, &groups, dtypes, states, None, 0);
        let collectives = work.reduce.iter().chain(&work.gather).chain(&work.exposed);
        found.extend(collectives.copied().map(Key::Collective));
        let ops = work
            .optimizer
            .into_iter()
            .chain(ends::cleared(&held, [1; 2]));
        found.extend(ops.map(Key::Op));
    }
    let world = Mesh::of(layout).everyone(job.cluster);
    let sums = ends::sums(job.model, job.cluster.gpu.is_cpu(), world);
    found.extend(sums.into_iter().map(Key::Collective));
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::layout::Degrees;
    use crate::model::presets;
    use crate::stack::megatron::Declared;
    use moefold_profiles::Op;
    use moefold_profiles::presets as clusters;

    #[test]
    fn a_folded_layout_has_keys_of_every_kind_and_no_key_twice() {
        let model = presets::load("quickstart").expect("a preset");
        let batch = Batch {
            seq_len: 128,
            global_batch: 8,
        };
        let degrees = Degrees {
            gpus: 4,
            tp: 2,
            cp: 1,
            pp: 1,
            vpp: 1,
            ep: 4,
            etp: 1,
            mbs: 4,
        };
        let layout = Layout::new(&degrees, &model, &batch).expect("legal");
        let cluster = clusters::local(4);
        let job = Job {
            model: &model,
            cluster: &cluster,
            batch: &batch,
            precision: Precision::Fp32,
            dispatcher: Dispatcher::Alltoall,
            cp_comm: CpComm::default(),
            capacity: None,
            optimizer: Optimizer::Adam,
            masters: Masters::default(),
            optimizer_offload: HostShare::default(),
            division: Division::Whole,
            runtime: &Declared,
        };
        let keys = keys(&job, &layout);
        let stems: std::collections::BTreeSet<&str> = keys.iter().map(Key::stem).collect();
        for stem in [
            "gemm",
            "grouped_gemm",
            "attention",
            "adamw",
            "all_to_all",
            "all_gather",
        ] {
            assert!(stems.contains(stem), "{stem} is missing from {stems:?}");
        }
        let mut distinct = keys.clone();
        distinct.dedup();
        assert_eq!(distinct, keys);

        // A unit for each bucket: layers that are alike have one key.
        let updates = |division| -> (usize, u64) {
            let job = Job { division, ..job };
            let updates = super::keys(&job, &layout).into_iter();
            let lens = updates.filter_map(|key| match key {
                Key::Op(Op::Adamw { len, .. }) => Some(len),
                _ => None,
            });
            lens.fold((0, 0), |(count, sum), len| (count + 1, sum + len))
        };
        let (whole, divided) = (updates(Division::Whole), updates(Division::AtLeast(1)));
        assert_eq!(whole.0, 2);
        assert!(
            divided.0 > 2 && divided.1 < whole.1,
            "{divided:?} {whole:?}"
        );
    }
}
