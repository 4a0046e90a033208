//! [`Row`]: a measurement, and how a line of a table is read as one.

use moefold_profiles::{Cluster, Dtype, Precision, presets};

use super::csv::Line;
use super::error::RowError;
use crate::choice::{
    Capacity, Dispatcher, DropPolicy, Graphs, HostShare, Masters, Optimizer, Overlap,
    PrimaryWeights, RecomputePlan, ScheduleName, StackName, Zero,
};
use crate::layout::{Batch, PartialDegrees};
use crate::model::{Mixer, Model, count};
use crate::options::{PipelineLayout, SearchOptions};

/// One measurement: a setup, and what was measured of it.
#[derive(Debug, Clone, PartialEq)]
pub struct Row {
    /// The file it is from, without folder and extension.
    pub table: String,
    /// Its name in its source.
    pub id: String,
    /// Who measured, in a word.
    pub source: String,
    /// Which of the source's software it ran, where there are several.
    pub release: String,
    /// The model in words: preset, and how it was changed.
    pub subject: String,
    /// The model.
    pub model: Model,
    /// The cluster.
    pub cluster: Cluster,
    /// Ranks.
    pub gpus: u32,
    /// What the source states is pinned; the rest is the search's choice.
    pub options: SearchOptions,
    /// What came of it.
    pub outcome: Outcome,
    /// Seconds a step, where the source says.
    pub step_s: Option<f64>,
    /// Most memory that the framework's allocator had given out on a rank, GiB, where the source says.
    pub mem_gib: Option<f64>,
    /// Whether only the order of rows of its source counts, since the source's FLOPs are ambiguous.
    pub order_only: bool,
    /// Knobs that nothing prices, in words.
    pub remarks: String,
    /// Where in the source it stands.
    pub source_ref: String,
}

moefold_profiles::named! {
    /// What came of a run.
    pub enum Outcome {
        /// It trained.
        Ran = "ran",
        /// It ran out of memory.
        OutOfMemory = "oom",
    }
}

impl Row {
    /// Reads a line.
    pub(super) fn of(line: &Line<'_>) -> Result<Self, RowError> {
        let name = needed(line, "model")?;
        let mut model =
            Model::resolve(name).map_err(|error| line.refuse("model", error.to_string()))?;
        change(line, &mut model)?;
        let cluster = needed(line, "cluster")?;
        let cluster =
            presets::resolve(cluster).map_err(|error| line.refuse("cluster", error.to_string()))?;
        let gpus = line.degree("gpus")?;
        let gpus = gpus.ok_or_else(|| line.refuse("gpus", "a number of GPUs"))?;
        let options = options(line, &model)?;
        let step_s = step_s(line, &model, gpus, options.batch)?;
        let mem_gib = line.quantity("mem_gib")?;
        let outcome = one_of(line, "outcome", &Outcome::ALL, Outcome::name)?;
        let outcome = outcome.unwrap_or(Outcome::Ran);
        if outcome == Outcome::Ran && step_s.is_none() && mem_gib.is_none() {
            return Err(line.refuse(
                "step_ms",
                "a measurement in step_ms, tokens_per_s_per_gpu, tflops_per_gpu or mem_gib",
            ));
        }
        let order_only = line.meaning("judged", |word| match word {
            "all" => Ok(false),
            "order" => Ok(true),
            _ => Err("all or order".to_owned()),
        })?;
        let source = match line.cell("source") {
            "" => "own",
            source => source,
        };
        let changes = line.cell("changes");
        Ok(Self {
            table: line.table(),
            id: needed(line, "id")?.to_owned(),
            source: source.to_owned(),
            release: line.cell("release").to_owned(),
            subject: format!("{} {changes}", model.name).trim_end().to_owned(),
            model,
            cluster,
            gpus,
            options,
            outcome,
            step_s,
            mem_gib,
            order_only: order_only.unwrap_or(false),
            remarks: line.cell("remarks").to_owned(),
            source_ref: line.cell("source_ref").to_owned(),
        })
    }

    /// Rows of one question, which differ in the layout alone: who measured with which software, model,
    /// cluster, GPUs, precision, batch and knobs without a price are the same.
    pub fn question(&self) -> String {
        let batch = self.options.batch;
        format!(
            "{} {}, {}, {} x {}, {}, {} sequences of {}, {}",
            self.source,
            self.release,
            self.subject,
            self.gpus,
            self.cluster.name,
            self.options.precision,
            batch.global_batch,
            batch.seq_len,
            self.remarks
        )
    }

    /// Degrees that the source states, and what replicas divide besides the states of the optimizer.
    pub fn layout(&self) -> String {
        let pins = &self.options.pins;
        match self.options.zero {
            Zero::States => pins.to_string(),
            zero => format!("{pins},zero={}", zero.name()),
        }
    }

    /// Rows whose errors are alike: one source's runs of one model.
    pub fn family(&self) -> String {
        format!("{}, {}", self.source, self.subject)
    }
}

/// Columns that every table has.
pub(super) const REQUIRED: [&str; 7] = [
    "id",
    "model",
    "cluster",
    "gpus",
    "precision",
    "seq_len",
    "global_batch",
];

/// All columns there are.
pub(super) const COLUMNS: [&str; 40] = [
    "id",
    "source",
    "release",
    "model",
    "changes",
    "cluster",
    "gpus",
    "precision",
    "seq_len",
    "global_batch",
    "tp",
    "cp",
    "pp",
    "vpp",
    "ep",
    "etp",
    "mbs",
    "recompute",
    "dispatcher",
    "schedule",
    "stages",
    "zero",
    "instances",
    "optimizer",
    "optimizer_offload",
    "masters",
    "primary_weights",
    "grad_dtype",
    "overlap",
    "cuda_graph",
    "fp8_attention",
    "expert_capacity",
    "outcome",
    "step_ms",
    "tokens_per_s_per_gpu",
    "tflops_per_gpu",
    "mem_gib",
    "judged",
    "remarks",
    "source_ref",
];

fn needed<'a>(line: &'a Line<'_>, column: &'static str) -> Result<&'a str, RowError> {
    match line.cell(column) {
        "" => Err(line.refuse(column, "a value in every line")),
        cell => Ok(cell),
    }
}

/// One of the names of a closed set; nothing where the cell is empty.
fn one_of<T: Copy>(
    line: &Line<'_>,
    column: &'static str,
    all: &[T],
    name: fn(T) -> &'static str,
) -> Result<Option<T>, RowError> {
    line.meaning(column, |word| {
        let found = all.iter().find(|&&member| name(member) == word).copied();
        let names = || all.iter().map(|&member| name(member)).collect::<Vec<_>>();
        found.ok_or_else(|| format!("one of {}", names().join(", ")))
    })
}

/// Makes of a preset what was trained: `layers=4 dense=1 mtp=0 kv_heads=16`, any of them.
fn change(line: &Line<'_>, model: &mut Model) -> Result<(), RowError> {
    let expected = "some of layers=N, dense=N (of those layers), mtp=N, kv_heads=N, with spaces";
    let refuse = || line.refuse("changes", expected);
    let (mut layers, mut dense) = (None, None);
    for word in line.cell("changes").split_whitespace() {
        let (key, value) = word.split_once('=').ok_or_else(refuse)?;
        let value: usize = value.parse().map_err(|_| refuse())?;
        match key {
            "layers" => layers = Some(value),
            "dense" => dense = Some(value),
            "mtp" if value <= model.mtp.len() => model.mtp.truncate(value),
            "kv_heads" => {
                for layer in &mut model.layers {
                    if let Some(Mixer::Gqa(gqa)) = &mut layer.mixer {
                        gqa.kv_heads = value as u64;
                    }
                }
            }
            _ => return Err(refuse()),
        }
    }
    let Some(layers) = layers else {
        return if dense.is_none() {
            Ok(())
        } else {
            Err(refuse())
        };
    };
    if layers == 0 || layers > model.layers.len() || dense.is_some_and(|dense| dense > layers) {
        let whole = model.layers.len();
        return Err(line.refuse(
            "changes",
            format!("1 to {whole} layers, the model's, and no more dense ones"),
        ));
    }
    if let Some(dense) = dense {
        // The first layers of such models are dense and the last are not.
        let (first, last) = (model.layers[0].clone(), model.layers.last().cloned());
        let last = last.expect("a model has layers");
        model.layers = vec![last; layers];
        model.layers[..dense].fill(first);
    }
    model.layers.truncate(layers);
    Ok(())
}

/// What the line pins.
fn options(line: &Line<'_>, model: &Model) -> Result<SearchOptions, RowError> {
    let size = |column| {
        let found = line.count(column)?;
        found.ok_or_else(|| line.refuse(column, "a whole number above 0"))
    };
    let batch = Batch {
        seq_len: size("seq_len")?,
        global_batch: size("global_batch")?,
    };
    let precision = one_of(line, "precision", &Precision::ALL, Precision::name)?;
    let optimizer = one_of(line, "optimizer", &Optimizer::ALL, Optimizer::name)?;
    let grad_dtype = line.meaning("grad_dtype", |word| match word {
        "fp32" => Ok(Dtype::F32),
        "bf16" => Ok(Dtype::Bf16),
        _ => Err("fp32 or bf16".to_owned()),
    })?;
    let fp8_attention = line.meaning("fp8_attention", |word| match word {
        "on" => Ok(true),
        "off" => Ok(false),
        _ => Err("on or off".to_owned()),
    })?;
    let capacity = line.meaning("expert_capacity", |words| {
        let (factor, pad) = match words.strip_suffix(" pad") {
            Some(factor) => (factor, true),
            None => (words, false),
        };
        let factor = factor.parse().ok();
        let factor = factor.filter(|factor: &f64| factor.is_finite() && *factor > 0.0);
        let capacity = factor.map(|factor| Capacity {
            factor,
            drop_policy: DropPolicy::default(),
            pad,
        });
        capacity.ok_or_else(|| "a factor above 0, with pad behind it or not".to_owned())
    })?;
    let pins = PartialDegrees {
        tp: line.degree("tp")?,
        cp: line.degree("cp")?,
        pp: line.degree("pp")?,
        vpp: line.degree("vpp")?,
        ep: line.degree("ep")?,
        etp: line.degree("etp")?,
        mbs: line.degree("mbs")?,
        ..PartialDegrees::default()
    };
    let stages = match line.cell("stages") {
        "even" => Some(even(line, model, &pins)?),
        _ => line.meaning("stages", |words| {
            words
                .parse::<PipelineLayout>()
                .map_err(|error| format!("even, or Megatron's words: {error}"))
        })?,
    };
    let defaults = SearchOptions::new(batch, StackName::Megatron);
    Ok(SearchOptions {
        precision: precision.ok_or_else(|| line.refuse("precision", "a value in every line"))?,
        pins,
        dispatcher: one_of(line, "dispatcher", &Dispatcher::ALL, Dispatcher::name)?,
        recompute: line.meaning("recompute", str::parse::<RecomputePlan>)?,
        overlap: line.meaning("overlap", str::parse::<Overlap>)?,
        schedule: one_of(line, "schedule", &ScheduleName::ALL, ScheduleName::name)?,
        stages,
        graphs: Some(
            line.meaning("cuda_graph", str::parse::<Graphs>)?
                .unwrap_or_default(),
        ),
        fp8_attention: fp8_attention.unwrap_or(false),
        capacity,
        zero: one_of(line, "zero", &Zero::ALL, Zero::name)?.unwrap_or_default(),
        instances: line.degree("instances")?.unwrap_or(defaults.instances),
        optimizer: optimizer.unwrap_or(defaults.optimizer),
        masters: one_of(line, "masters", &Masters::ALL, Masters::name)?.unwrap_or_default(),
        optimizer_offload: HostShare(line.quantity("optimizer_offload")?.unwrap_or(0.0)),
        primary_weights: one_of(
            line,
            "primary_weights",
            &PrimaryWeights::ALL,
            PrimaryWeights::name,
        )?
        .unwrap_or_default(),
        grad_dtype: grad_dtype.unwrap_or(defaults.grad_dtype),
        top: 1,
        // What ran has fitted, with or without room to spare.
        memory_headroom: 0.0,
        ..defaults
    })
}

/// As many layers on every rank, where they divide.
fn even(line: &Line<'_>, model: &Model, pins: &PartialDegrees) -> Result<PipelineLayout, RowError> {
    let stages = pins.pp.unwrap_or(1) as usize * pins.vpp.unwrap_or(1) as usize;
    let layers: Vec<u32> = (0..model.layers.len() as u32).collect();
    if !layers.len().is_multiple_of(stages) {
        let number = layers.len();
        return Err(line.refuse("stages", format!("stages that divide {number} layers")));
    }
    let each = layers.len() / stages;
    let stages: Vec<Vec<u32>> = layers.chunks(each).map(<[u32]>::to_vec).collect();
    Ok(stages.into())
}

/// Seconds a step, from whichever of its forms the line has. Model FLOP/s are those of
/// [`count::flops_per_token`].
fn step_s(
    line: &Line<'_>,
    model: &Model,
    gpus: u32,
    batch: Batch,
) -> Result<Option<f64>, RowError> {
    let tokens_per_gpu = batch.seq_len as f64 * batch.global_batch as f64 / f64::from(gpus);
    let step = line.quantity("step_ms")?.map(|ms| ms / 1e3);
    let rate = line.quantity("tokens_per_s_per_gpu")?;
    let flops = line.quantity("tflops_per_gpu")?;
    let flops_per_token = count::flops_per_token(model, batch.seq_len).0;
    Ok(step
        .or(rate.map(|rate| tokens_per_gpu / rate))
        .or(flops.map(|tflops| tokens_per_gpu * flops_per_token / (tflops * 1e12))))
}
