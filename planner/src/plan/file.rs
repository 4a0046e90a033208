//! Reading and writing `plan.json`: one door, for searched and hand-edited plans alike.
//!
//! A file is accepted only when every key is known. Its layout and those of the runners-up are proven
//! legal again for its model, batch and choices, and derived degrees agree. Its stages hold every layer
//! exactly once, in order. What is predicted in it are finite times and sizes that add up, and no faster than
//! the device; how large they are is taken as written.

use std::path::{Path, PathBuf};

use moefold_profiles::files::write_atomically;
use moefold_profiles::nearest::nearest;
use serde_json::Value;

use super::{PLAN_VERSION, Place, Plan};
use crate::layout::{Illegal, Layout};

/// Keys of the file's top level.
const KEYS: [&str; 29] = [
    "version",
    "layout",
    "pipeline",
    "dispatcher",
    "cp_comm_type",
    "hierarchical_context_parallel_sizes",
    "capacity",
    "rank_order",
    "recompute",
    "offload",
    "precision",
    "optimizer",
    "grad_dtype",
    "masters",
    "primary_weights",
    "optimizer_offload_fraction",
    "zero",
    "optimizer_instances",
    "overlap",
    "cuda_graph",
    "fp8_attention",
    "bucket_elements",
    "stack",
    "predicted",
    "model",
    "cluster",
    "request",
    "profiles",
    "alternatives",
];

/// Why a file is not a plan.
#[derive(Debug, thiserror::Error)]
pub enum PlanFileError {
    /// It cannot be read or written; the source says why.
    #[error("{}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// It is no JSON, or a value is not of its kind.
    #[error("{}: {problem}", path.display())]
    Malformed {
        /// The file.
        path: PathBuf,
        /// Where and what.
        problem: String,
    },
    /// A key that no version of the format has.
    #[error("{}: unknown key `{key}`; nearest: `{nearest}`", path.display())]
    UnknownKey {
        /// The file.
        path: PathBuf,
        /// What was found.
        key: String,
        /// The known key spelled most alike.
        nearest: &'static str,
    },
    /// Another version of the format.
    #[error("{}: version {found}, this program reads version {PLAN_VERSION}; plan it again", path.display())]
    Version {
        /// The file.
        path: PathBuf,
        /// What was found.
        found: String,
    },
    /// A layout that is not legal for the model, batch and choices in the file.
    #[error("{}: {key}: {}", path.display(), sentences(broken))]
    Illegal {
        /// The file.
        path: PathBuf,
        /// Where it stands.
        key: String,
        /// Every rule broken.
        broken: Vec<Illegal>,
    },
    /// A number that follows from others and does not.
    #[error("{}: {key} is {found}, the rest of the plan makes it {expected}", path.display())]
    Contradiction {
        /// The file.
        path: PathBuf,
        /// Which.
        key: String,
        /// What was found.
        found: String,
        /// What it has to be.
        expected: String,
    },
    /// A number that no plan has.
    #[error("{}: {key} is {found}; expected {expected}", path.display())]
    Value {
        /// The file.
        path: PathBuf,
        /// Which.
        key: String,
        /// What was found.
        found: String,
        /// What it has to be.
        expected: String,
    },
}

fn sentences(broken: &[Illegal]) -> String {
    let sentences: Vec<String> = broken.iter().map(ToString::to_string).collect();
    sentences.join("; ")
}

/// Something else where a plan was expected.
fn other(path: &Path, found: &str) -> PlanFileError {
    PlanFileError::Malformed {
        path: path.to_owned(),
        problem: format!("is {found}; expected a plan, which `moefold plan --out FILE` writes"),
    }
}

impl Plan {
    /// Reads and checks a plan.
    pub fn load(path: &Path) -> Result<Self, PlanFileError> {
        if path.is_dir() {
            let own = path.join("plan.json");
            let of_run = if own.is_file() {
                format!(" (the plan of its run is {})", own.display())
            } else {
                String::new()
            };
            return Err(other(path, &format!("a directory{of_run}")));
        }
        let text = std::fs::read_to_string(path).map_err(|source| PlanFileError::Io {
            path: path.to_owned(),
            source,
        })?;
        Self::parse(&text, path)
    }

    /// Reads and checks the text of a plan; `path` is named in errors.
    pub fn parse(text: &str, path: &Path) -> Result<Self, PlanFileError> {
        let malformed = |error: serde_json::Error| PlanFileError::Malformed {
            path: path.to_owned(),
            problem: error.to_string(),
        };
        let value: Value = serde_json::from_str(text)
            .map_err(|error| other(path, &format!("no JSON ({error})")))?;
        let Some(object) = value.as_object() else {
            return Err(other(path, "JSON but no object"));
        };
        if object.contains_key("plans") {
            return Err(other(path, "an answer of `plan --json`"));
        }
        // The version first: a newer format may well have other keys.
        match object.get("version") {
            Some(version) if version.as_u64() == Some(PLAN_VERSION.into()) => {}
            version => {
                return Err(PlanFileError::Version {
                    path: path.to_owned(),
                    found: version.map_or("none".to_owned(), ToString::to_string),
                });
            }
        }
        if let Some(key) = object.keys().find(|key| !KEYS.contains(&key.as_str())) {
            return Err(PlanFileError::UnknownKey {
                path: path.to_owned(),
                key: key.clone(),
                nearest: nearest(key, KEYS).unwrap_or(KEYS[0]),
            });
        }
        let plan: Self = serde_json::from_value(value).map_err(malformed)?;
        plan.check(path)?;
        Ok(plan)
    }

    /// Writes the plan under a temporary name beside `path` and renames it.
    pub fn save(&self, path: &Path) -> Result<(), PlanFileError> {
        let io = |source| PlanFileError::Io {
            path: path.to_owned(),
            source,
        };
        let text =
            serde_json::to_string_pretty(self).map_err(|error| PlanFileError::Malformed {
                path: path.to_owned(),
                problem: error.to_string(),
            })?;
        write_atomically(path, |out| writeln!(out, "{text}")).map_err(io)
    }

    /// The layout, its degrees proven legal again.
    pub fn layout(&self) -> Result<Layout, Vec<Illegal>> {
        let degrees = self.planned.layout.degrees(self.request.gpus);
        let pipeline = &self.planned.pipeline;
        let staged = (pipeline.schedule, pipeline.stages.len());
        let layout = Layout::of_stages(&degrees, staged, &self.model, &self.request.batch)?;
        let (pp, dp, edp) = (layout.pp(), layout.dp(), layout.edp());
        layout
            .numbered(self.planned.rank_order.unwrap_or_default())
            .ok_or_else(|| vec![Illegal::PipelineGroups { pp, dp, edp }])
    }

    fn check(&self, path: &Path) -> Result<(), PlanFileError> {
        let place = Place { path, prefix: "" };
        let (planned, model, request) = (&self.planned, &self.model, &self.request);
        place.check_model(model)?;
        place.check_cluster(&self.cluster)?;
        planned.check(&place, model, request, &self.profiles)?;
        for (index, runner_up) in self.alternatives.iter().enumerate() {
            let prefix = &format!("alternatives[{index}].");
            planned.prove_runner_up(&Place { path, prefix }, model, request, runner_up)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use crate::stack::megatron::Declared;
    use moefold_profiles::pricing::Costs;

    use super::*;
    use crate::choice::{Overlap, StackName};
    use crate::layout::Batch;
    use crate::model::presets;
    use crate::options::SearchOptions;

    fn plan() -> Plan {
        let model = presets::load("mixtral-8x7b").expect("a preset");
        let cluster = moefold_profiles::presets::cluster("dgx-h100").expect("a preset");
        let batch = Batch {
            seq_len: 4096,
            global_batch: 64,
        };
        let mut options = SearchOptions::new(batch, StackName::Megatron);
        options.pins = "tp=2,cp=1,pp=4,vpp=2,ep=8,etp=1,mbs=1"
            .parse()
            .expect("degrees");
        let costs = Costs::for_cluster(&cluster, &[]);
        let found =
            crate::search::plan(&model, &cluster, 32, &options, &costs, &Declared).expect("fits");
        Plan {
            alternatives: found.alternatives,
            ..Plan::of(found.plans[0].clone(), &model, &cluster, 32, &options)
        }
    }

    fn edited(edit: impl FnOnce(&mut Value)) -> String {
        let mut value = serde_json::to_value(plan()).expect("a plan serializes");
        edit(&mut value);
        let path = Path::new("plan.json");
        Plan::parse(&value.to_string(), path)
            .expect_err("an edited plan is refused")
            .to_string()
    }

    #[test]
    fn law_a_plan_round_trips_through_its_file() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("plan.json");
        let mut plan = plan();
        plan.planned.overlap = Some(Overlap::default());
        plan.save(&path).expect("saves");
        assert_eq!(Plan::load(&path).expect("loads"), plan);
        let left = std::fs::read_dir(folder.path()).expect("lists").count();
        assert_eq!(left, 1, "no temporary file stays");
    }

    #[test]
    fn what_is_no_plan_is_said_to_be_something_else() {
        let folder = tempfile::tempdir().expect("a folder");
        let refused = |path: &Path, expected: &str| {
            let error = Plan::load(path).expect_err(expected).to_string();
            assert!(error.contains(expected), "{expected:?} is not in: {error}");
        };
        refused(folder.path(), "is a directory; expected a plan");
        let path = folder.path().join("plan.json");
        for (text, expected) in [
            ("One morning", "is no JSON (expected value"),
            ("[1]", "is JSON but no object"),
            ("{\"plans\": []}", "is an answer of `plan --json`"),
        ] {
            std::fs::write(&path, text).expect("writable");
            refused(&path, expected);
        }
        refused(folder.path(), "the plan of its run is");
    }

    #[test]
    fn hand_edits_that_break_a_rule_are_refused_by_name() {
        type Edit = fn(&mut Value);
        let cases: [(&str, Edit); 23] = [
            ("version 7", |plan| plan["version"] = 7.into()),
            ("unknown key `recompte`; nearest: `recompute`", |plan| {
                plan["recompte"] = "none".into();
            }),
            ("found `dp`, expected none, or some of", |plan| {
                plan["overlap"] = "dp".into();
            }),
            (
                "`ddp_bucket_size` 7 (`bucket_elements` of a plan) divides nothing",
                |plan| {
                    plan["bucket_elements"] = 7.into();
                },
            ),
            ("`zero` fsdp gathers layers in every microbatch", |plan| {
                plan["zero"] = "fsdp".into();
            }),
            ("unknown field `foo`", |plan| {
                plan["layout"]["foo"] = 1.into();
            }),
            ("tp = 64", |plan| plan["layout"]["tp"] = 64.into()),
            ("8 experts are not divisible by ep = 3", |plan| {
                plan["layout"]["ep"] = 3.into();
            }),
            ("no layer of the model has mla_up_proj", |plan| {
                plan["recompute"] = serde_json::json!(["mla_up_proj"]);
            }),
            ("the moefold stack has no `dispatcher` hybridep", |plan| {
                plan["stack"] = "moefold".into();
            }),
            (
                "alternatives[0].layout: 32 GPUs are not divisible",
                |plan| {
                    let mut runner_up =
                        serde_json::json!({"step_s": 1.0, "peak_gib": 1.0, "why": ""});
                    runner_up["recompute"] = "none".into();
                    runner_up["layout"] = plan["layout"].clone();
                    runner_up["layout"]["tp"] = 64.into();
                    plan["alternatives"] = vec![runner_up].into();
                },
            ),
            ("layout.dp is 3", |plan| plan["layout"]["dp"] = 3.into()),
            ("layout.microbatches is 9", |plan| {
                plan["layout"]["microbatches"] = 9.into();
            }),
            ("wrong at layer 0", |plan| {
                plan["pipeline"]["stages"][0][0] = 5.into();
            }),
            ("7 stages", |plan| {
                let stages = plan["pipeline"]["stages"].as_array_mut().expect("a list");
                stages.pop();
            }),
            ("predicted.peak_gib is -1.0", |plan| {
                plan["predicted"]["peak_gib"] = (-1.0).into();
            }),
            ("predicted.memory_gib.weights is -2.0", |plan| {
                plan["predicted"]["memory_gib"]["weights"] = (-2.0).into();
            }),
            ("predicted.time_s is a sum of", |plan| {
                plan["predicted"]["time_s"]["attention"] = 1e6.into();
            }),
            (
                "predicted.mfu is 7.5; expected a fraction of the peak, above 0 and at most 1",
                |plan| {
                    plan["predicted"]["mfu"] = 7.5.into();
                },
            ),
            ("predicted.mfu is 0; expected a fraction", |plan| {
                plan["predicted"]["mfu"] = 0.0.into();
            }),
            ("predicted.memory_gib_by_pp_rank is 3 entries", |plan| {
                plan["predicted"]["memory_gib_by_pp_rank"] = vec![1.0; 3].into();
            }),
            (
                "predicted.memory_classes_gib_by_pp_rank is 1 entries",
                |plan| {
                    let each = plan["predicted"]["memory_classes_gib_by_pp_rank"].as_array_mut();
                    each.expect("a list").truncate(1);
                },
            ),
            (
                "predicted.memory_classes_gib_by_pp_rank[1] is a sum of",
                |plan| {
                    plan["predicted"]["memory_classes_gib_by_pp_rank"][1]["weights"] = 1e6.into();
                },
            ),
        ];
        for (expected, edit) in cases {
            let message = edited(edit);
            assert!(message.contains(expected), "{expected}: {message}");
        }
    }

    #[test]
    fn a_cluster_has_gpus_and_these_have_memory() {
        for (key, value) in [
            ("/gpu/num_sms", 0),
            ("/gpu/memory_gib", -5),
            ("/gpus_per_node", 0),
            ("/gpus_per_domain", 0),
            ("/gpus_per_host_link", 0),
        ] {
            let message = edited(|plan| {
                // A link of its own is left unsaid.
                plan["cluster"]["gpus_per_host_link"] = 1.into();
                let found = plan["cluster"].pointer_mut(key);
                *found.expect("a key of a cluster") = value.into();
            });
            let expected = format!("cluster{} is {value}", key.replace('/', "."));
            assert!(message.contains(&expected), "{message}");
        }
    }

    #[test]
    fn a_device_bounds_what_neither_a_profile_nor_a_capacity_does() {
        let mut value = serde_json::to_value(plan()).expect("a plan serializes");
        value["predicted"]["mfu"] = 1.5.into();
        let read = |value: &Value| Plan::parse(&value.to_string(), Path::new("plan.json"));
        assert!(read(&value).is_err());
        let mut measured = value.clone();
        measured["profiles"] = serde_json::json!([{ "name": "measured", "hash": "0" }]);
        assert!(read(&measured).is_ok());
        measured["predicted"]["mfu"] = (-0.0).into();
        assert!(read(&measured).is_err());
        value["capacity"] =
            serde_json::json!({ "factor": 1.0, "drop_policy": "probs", "pad": false });
        let why = read(&value).err().map(|error| error.to_string());
        assert_eq!(why, None);
    }

    #[test]
    fn a_cause_is_said_once() {
        let error = Plan::load(Path::new("nofile.json")).expect_err("missing");
        let cause = std::error::Error::source(&error)
            .expect("a cause")
            .to_string();
        assert_eq!(error.to_string(), "nofile.json");
        assert!(cause.contains("No such file"), "{cause}");
    }
}
