//! Requests to the planner, as `plan` makes them of its flags.

use std::collections::BTreeMap;
use std::ops::ControlFlow;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use moefold_executor::trace;
use moefold_planner::choice::{Capacity, HostShare, RecomputePlan, StackName};
use moefold_planner::layout::{Batch, PartialDegrees};
use moefold_planner::model::{Model, hf, presets as models};
use moefold_planner::options::{PipelineLayout, PlanError, SearchOptions};
use moefold_planner::plan::{Plan, PlannedLayout};
use moefold_planner::search::{self, Progress};
use moefold_profiles::{Cluster, Costs, Precision, presets};
use serde::de::DeserializeOwned;
use serde_json::{Map, Value};

use crate::target::Target;

/// As `--time-limit`.
const LIMIT: Duration = Duration::from_millis(200);

pub(super) const TARGET: Target = Target::new(
    "search",
    "a request for a plan, searched for 0.2 s",
    |_, input| {
        let Ok(Value::Object(asked)) = serde_json::from_slice(input) else {
            return Err("no object".to_owned());
        };
        searched(&Asked(asked))
    },
)
.one_of(25);

/// A request: values of flags by their names, with underscores.
struct Asked(Map<String, Value>);

impl Asked {
    fn get<T: DeserializeOwned>(&self, flag: &str) -> Result<Option<T>, String> {
        match self.0.get(flag) {
            None | Some(Value::Null) => Ok(None),
            Some(value) => serde_json::from_value(value.clone())
                .map(Some)
                .map_err(|error| format!("{flag}: {error}")),
        }
    }

    fn need<T: DeserializeOwned>(&self, flag: &str) -> Result<T, String> {
        self.get(flag)?.ok_or_else(|| format!("{flag} is missing"))
    }

    /// The value of a flag that is read from a word.
    fn word<T: std::str::FromStr>(&self, flag: &str) -> Result<Option<T>, String> {
        let word: Option<String> = self.get(flag)?;
        let read = word.map(|word| word.parse());
        read.transpose().map_err(|_| format!("{flag} is no word"))
    }

    fn model(&self) -> Result<Model, String> {
        match self.0.get("model") {
            Some(Value::String(name)) => models::load(name).map_err(|error| error.to_string()),
            Some(config) => {
                hf::parse("config.json", &config.to_string()).map_err(|error| error.to_string())
            }
            None => Err("model is missing".to_owned()),
        }
    }

    fn options(&self, cluster: &Cluster) -> Result<SearchOptions, String> {
        let batch = Batch {
            seq_len: self.need("seq_len")?,
            global_batch: self.need("global_batch")?,
        };
        let on_cpu = cluster.gpu.is_cpu();
        let stack = match self.get("stack")? {
            Some(stack) => stack,
            None if on_cpu => StackName::Moefold,
            None => StackName::Megatron,
        };
        let mut options = SearchOptions::new(batch, stack);
        let on_gpus = (!on_cpu).then_some(Precision::Bf16);
        if let Some(precision) = self.get("precision")?.or(on_gpus) {
            options.precision = precision;
        }
        options.pins = self.word::<PartialDegrees>("layout")?.unwrap_or_default();
        options.dispatcher = self.get("dispatcher")?;
        options.cp_comm = self.get("cp_comm_type")?.unwrap_or_default();
        options.capacity = self.get::<Capacity>("capacity")?;
        options.recompute = self.word::<RecomputePlan>("recompute")?;
        if self.0.contains_key("offload") {
            options.offload = self.get("offload")?;
        }
        options.stages = self.word::<PipelineLayout>("pipeline_layout")?;
        options.schedule = self.get("schedule")?;
        options.overlap = self.get("overlap")?;
        options.graphs = Some(self.get("cuda_graph")?.unwrap_or_default());
        options.zero = self.get("zero")?.unwrap_or_default();
        options.bucket_elements = self.get("ddp_bucket_size")?;
        options.optimizer = self.get("optimizer")?.unwrap_or(options.optimizer);
        options.masters = self.get("masters")?.unwrap_or_default();
        options.optimizer_offload =
            HostShare(self.get("optimizer_offload_fraction")?.unwrap_or_default());
        options.grad_dtype = self.get("grad_dtype")?.unwrap_or(options.grad_dtype);
        options.objective = self.get("objective")?.unwrap_or(options.objective);
        if let Some(percent) = self.get::<f64>("memory_headroom")? {
            options.memory_headroom = percent / 100.0;
        }
        let top: u16 = self.get("top")?.unwrap_or(5);
        options.top = usize::from(top.clamp(1, 1000));
        options.survey = self.get("json")?.unwrap_or(false);
        Ok(options)
    }
}

/// A cluster with its prices, which take longer to make than a search takes.
fn priced(name: &str, gpus: u32) -> Result<(Cluster, Arc<Costs>), String> {
    static KNOWN: Mutex<BTreeMap<String, (Cluster, Arc<Costs>)>> = Mutex::new(BTreeMap::new());
    let made = |cluster: Cluster| {
        let costs = Arc::new(Costs::for_cluster(&cluster, &[]));
        (cluster, costs)
    };
    if name.eq_ignore_ascii_case("local") {
        return Ok(made(presets::local(gpus)));
    }
    let mut known = KNOWN.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(found) = known.get(name) {
        return Ok(found.clone());
    }
    let cluster = presets::cluster(name).map_err(|error| error.to_string())?;
    let found = made(cluster);
    known.insert(name.to_owned(), found.clone());
    Ok(found)
}

fn searched(asked: &Asked) -> Result<(), String> {
    let model = asked.model()?;
    let gpus: u32 = asked.need("gpus")?;
    if gpus == 0 {
        return Err("no GPUs".to_owned());
    }
    let (cluster, costs) = priced(&asked.need::<String>("cluster")?, gpus)?;
    if let Some(there) = cluster.num_gpus.filter(|there| *there < gpus) {
        return Err(format!("{there} GPUs are there"));
    }
    let options = asked.options(&cluster)?;
    let began = Instant::now();
    let watch = |_: &Progress| {
        if began.elapsed() > LIMIT {
            ControlFlow::Break(())
        } else {
            ControlFlow::Continue(())
        }
    };
    let runtime = trace::runtime(options.stack, &model, &cluster);
    let runtime = runtime.as_ref();
    let question = search::Asked {
        watch: &watch,
        ..search::Asked::new(&model, &cluster, gpus, &options, &costs, runtime)
    };
    let plans = match search::plan_watched(&question) {
        Ok(found) => found.plans,
        Err(error) => {
            if let PlanError::Infeasible { least, .. } = &error {
                // As the command line says beside such an error.
                search::closest(&question, least.as_deref());
            }
            return Err(error.to_string());
        }
    };
    if let Some(why) = asked.word::<PartialDegrees>("why")? {
        // One that makes no sense is refused.
        let _ = search::why(&question, &why, &plans);
    }
    for planned in plans {
        judge(planned, &model, &cluster, gpus, &options);
    }
    Ok(())
}

/// A plan that was found is one that is read, and promises nothing that a device cannot do.
fn judge(
    planned: PlannedLayout,
    model: &Model,
    cluster: &Cluster,
    gpus: u32,
    options: &SearchOptions,
) {
    let (mfu, step_s) = (planned.predicted.mfu, planned.predicted.step_s);
    assert!(mfu > 0.0 && mfu <= 1.0, "an MFU of {mfu}");
    assert!(step_s > 0.0 && step_s.is_finite(), "a step of {step_s} s");
    let plan = Plan::of(planned, model, cluster, gpus, options);
    let text = serde_json::to_string(&plan).expect("plain data");
    let read = Plan::parse(&text, Path::new("plan.json"));
    let read = read.unwrap_or_else(|error| panic!("a plan that was found is refused: {error}"));
    assert!(read == plan, "a plan that was found is read as another");
}
