//! Plans whose model somebody has edited: each is refused by the key, or walked; none ends the program.

use std::panic::{self, AssertUnwindSafe};
use std::path::Path;

use moefold_planner::choice::StackName;
use moefold_planner::layout::Batch;
use moefold_planner::model::presets;
use moefold_planner::options::SearchOptions;
use moefold_planner::plan::Plan;
use moefold_planner::search;
use moefold_profiles::{Costs, Precision, presets as clusters};
use serde_json::{Value, json};

use super::{Traced, dry_run};
use crate::data::Packing;
use crate::moe::balance::Balancing;

/// A plan of a preset on one node.
fn plan(name: &str) -> Value {
    let model = presets::load(name).expect("a preset");
    let cluster = clusters::cluster("dgx-h100").expect("a preset");
    let batch = Batch {
        seq_len: 64,
        global_batch: 8,
    };
    let options = SearchOptions {
        precision: Precision::Bf16,
        pins: "tp=2,cp=1,pp=1,ep=2,etp=1,mbs=1".parse().expect("degrees"),
        ..SearchOptions::new(batch, StackName::Moefold)
    };
    let costs = Costs::for_cluster(&cluster, &[]);
    let traced = Traced::new(&model, &cluster);
    let found = search::plan(&model, &cluster, 4, &options, &costs, &traced);
    let planned = found.expect("feasible").plans.swap_remove(0);
    let plan = Plan::of(planned, &model, &cluster, 4, &options);
    serde_json::to_value(plan).expect("plain data")
}

/// Pointers to all that is no list and no object; of layers that are alike, the first and the last.
fn leaves(value: &Value, at: &str, found: &mut Vec<String>) {
    match value {
        Value::Object(parts) => {
            for (key, part) in parts {
                leaves(part, &format!("{at}/{key}"), found);
            }
        }
        Value::Array(parts) => {
            for (index, part) in parts.iter().enumerate() {
                if index == 0 || index + 1 == parts.len() {
                    leaves(part, &format!("{at}/{index}"), found);
                }
            }
        }
        _ => found.push(at.to_owned()),
    }
}

#[test]
fn law_a_hostile_model_is_refused_or_walked() {
    let hostile = [
        json!(0),
        json!(1),
        json!(3),
        json!(24),
        json!(65_537),
        json!(262_144),
        json!(16_777_216),
        json!(1_u64 << 31),
        json!(1_u64 << 53),
        json!(i64::MAX),
        json!(u64::MAX),
        json!(-1),
        json!(0.5),
        json!(-1e308),
        json!(1e308),
        Value::Null,
        json!("silu"),
        json!([]),
        json!({}),
        json!(true),
    ];
    let (mut refused, mut walked, mut ended) = (0, 0, Vec::new());
    for name in ["tiny-mixtral", "bench-deepseek-v3"] {
        let whole = plan(name);
        let mut all = Vec::new();
        leaves(&whole["model"], "/model", &mut all);
        for at in all {
            for value in &hostile {
                let mut edited = whole.clone();
                *edited.pointer_mut(&at).expect("it is there") = value.clone();
                let read = || {
                    let plan = Plan::parse(&edited.to_string(), Path::new("plan.json"))
                        .map_err(|error| error.to_string())?;
                    let costs = Costs::for_cluster(&plan.cluster, &[]);
                    let (balancing, packing) = (Balancing::default(), Packing::default());
                    dry_run(&plan, 1, balancing, packing, &costs, &[])
                        .map_err(|error| error.to_string())
                };
                match panic::catch_unwind(AssertUnwindSafe(read)) {
                    Ok(Ok(_)) => walked += 1,
                    Ok(Err(_)) => refused += 1,
                    Err(_) => ended.push(format!("{name}: {at} = {value}")),
                }
            }
        }
    }
    assert!(ended.is_empty(), "{ended:#?}");
    assert!(
        refused > 500 && walked > 50,
        "{refused} refused, {walked} walked"
    );
}
