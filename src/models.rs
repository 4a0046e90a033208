//! `moefold models`: the model presets, or one model in full.

use moefold_planner::model::{Description, describe};
use moefold_planner::model::{Model, presets};
use moefold_reports::tables::Table;
use serde::Serialize;

use crate::cli::ModelsArgs;
use crate::failure::Failure;
use crate::output::Output;

/// One line of the list.
#[derive(Serialize)]
struct Row {
    name: &'static str,
    model_type: String,
    layers: usize,
    total_params: u64,
    active_params: u64,
    mtp_params: u64,
    experts: u64,
    topk: u64,
    flops_per_token: f64,
    ours: bool,
}

pub(crate) fn run(args: &ModelsArgs, output: Output) -> Result<(), Failure> {
    let Some(name) = &args.model else {
        let rows = presets::all()
            .iter()
            .map(|preset| {
                let described = describe(&preset.load()?, args.seq_len);
                Ok(Row {
                    name: preset.name,
                    model_type: described.model_type,
                    layers: described.layers,
                    total_params: described.total_params,
                    active_params: described.active_params,
                    mtp_params: described.mtp_params,
                    experts: described.experts,
                    topk: described.topk,
                    flops_per_token: described.flops_per_token,
                    ours: preset.ours,
                })
            })
            .collect::<Result<Vec<Row>, moefold_planner::model::ModelError>>()
            .map_err(Failure::runtime)?;
        return output.answer(&rows, || table(&rows, args.seq_len));
    };
    let model = Model::resolve(name).map_err(Failure::request)?;
    let description = describe(&model, args.seq_len);
    output.answer(&description, || text(&description))
}

/// Billions, with the digits people quote.
fn billions(count: u64) -> String {
    format!("{:.3}", count as f64 / 1e9)
}

fn table(rows: &[Row], seq_len: u64) -> String {
    let mut table = Table::new([
        "model",
        "type",
        ">layers",
        ">experts",
        ">top-k",
        ">total B",
        ">active B",
        ">MTP B",
        ">GFLOP/token",
    ]);
    for row in rows {
        let or_dash = |count: u64| {
            if count == 0 {
                "-".to_owned()
            } else {
                count.to_string()
            }
        };
        table.row([
            row.name.to_owned(),
            row.model_type.clone(),
            row.layers.to_string(),
            or_dash(row.experts),
            or_dash(row.topk),
            billions(row.total_params),
            billions(row.active_params),
            if row.mtp_params == 0 {
                "-".to_owned()
            } else {
                billions(row.mtp_params)
            },
            format!("{:.2}", row.flops_per_token / 1e9),
        ]);
    }
    format!(
        "{}\nFLOPs are those of one token in one training step at sequence length {seq_len}.\n",
        table.text()
    )
}

fn text(description: &Description) -> String {
    let mut table = Table::new(["key", ">value"]);
    let mut line = |key: &str, value: String| table.row([key.to_owned(), value]);
    line("model", description.name.clone());
    line("type", description.model_type.clone());
    line("layers", description.layers.to_string());
    line("  with experts", description.moe_layers.to_string());
    line("  dense", description.dense_layers.to_string());
    line(
        "  multi-token prediction",
        description.mtp_layers.to_string(),
    );
    line("hidden", description.hidden.to_string());
    line("vocabulary", description.vocab_size.to_string());
    if description.experts > 0 {
        line("experts", description.experts.to_string());
        line("  chosen a token", description.topk.to_string());
        line("  width", description.expert_width.to_string());
        line("  shared width", description.shared_width.to_string());
    }
    line("total parameters, B", billions(description.total_params));
    line("active parameters, B", billions(description.active_params));
    line(
        "  without embedding, B",
        billions(description.active_params_without_embedding),
    );
    line(
        "  without embedding and head, B",
        billions(description.active_params_body),
    );
    line("MTP parameters, B", billions(description.mtp_params));
    line(
        &format!("training GFLOP/token at {}", description.seq_len),
        format!("{:.2}", description.flops_per_token / 1e9),
    );
    format!(
        "{}\nlayers:\n  {}\nfeatures: {}\n",
        table.text(),
        description.structure.join("\n  "),
        description.features.join(", ")
    )
}
