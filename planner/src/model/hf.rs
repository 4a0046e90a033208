//! Reads Hugging Face configurations (`config.json`) into [`Model`].
//!
//! One file a family, each the only place that knows that family's keys and defaults; `keys` reads
//! values with their errors, `common` holds what families share. Both dialects are accepted: the
//! keys that hub repositories ship (transformers 4) and those a checkpoint re-saved by transformers
//! 5 has. Keys that no count, price or computation depends on are ignored; an unknown `model_type`
//! is refused. Nothing here builds a tensor or knows a layout.

mod bailing;
mod checks;
mod common;
mod dbrx;
mod deepseek;
mod deepseek_v4;
mod glm4;
mod gpt_oss;
mod keys;
mod llama;
mod llama4;
mod minimax;
mod mixtral;
mod nemotron_h;
mod qwen;
mod qwen3_next;

use std::path::Path;

use moefold_profiles::nearest::closest;
use serde_json::Value;

use self::common::TIED;
use self::keys::Keys;
use super::{Model, ModelError};

/// Reads one family's configuration.
type Reader = fn(&Keys<'_>) -> Result<Model, ModelError>;

/// Every `model_type` that is read, with its reader.
const READERS: &[(&str, Reader)] = &[
    ("bailing_moe", bailing::read),
    ("bailing_moe_v2", bailing::read),
    ("dbrx", dbrx::read),
    ("deepseek_v2", deepseek::read),
    ("deepseek_v3", deepseek::read),
    ("deepseek_v32", deepseek::read),
    ("deepseek_v4", deepseek_v4::read),
    ("glm4_moe", glm4::read),
    ("glm_moe_dsa", deepseek::read),
    ("gpt_oss", gpt_oss::read),
    ("granitemoe", mixtral::read_granite),
    ("kimi_k2", deepseek::read),
    ("llama", llama::read),
    ("llama4_text", llama4::read),
    ("minimax", minimax::read_text_01),
    ("minimax_m2", minimax::read_m2),
    ("minimax_text_01", minimax::read_text_01),
    ("mistral", llama::read),
    ("mixtral", mixtral::read),
    ("nemotron_h", nemotron_h::read),
    ("olmoe", mixtral::read_olmoe),
    ("phimoe", mixtral::read_phi),
    ("qwen2_moe", qwen::read),
    ("qwen3", llama::read),
    ("qwen3_moe", qwen::read),
    ("qwen3_next", qwen3_next::read),
];

/// Keys for which the class of a `model_type` has a default that is one model's (transformers 4.57, `configuration_*.py`), and on
/// which counts and prices depend, by their spellings: a file says them, if only with null.
const STATED: &[(&str, &[&[&str]])] = &[
    ("deepseek_v2", OF_DEEPSEEK),
    ("deepseek_v3", OF_DEEPSEEK),
    ("deepseek_v32", OF_DEEPSEEK),
    ("glm4_moe", &[KV_HEADS, SHARED, &["first_k_dense_replace"]]),
    ("glm_moe_dsa", OF_DEEPSEEK),
    ("gpt_oss", &[KV_HEADS, HEAD_DIM, WINDOW]),
    ("kimi_k2", OF_DEEPSEEK),
    ("llama4_text", &[KV_HEADS, HEAD_DIM]),
    ("minimax_m2", &[KV_HEADS, HEAD_DIM]),
    ("mistral", &[KV_HEADS, WINDOW]),
    ("mixtral", &[KV_HEADS]),
    ("nemotron_h", &[KV_HEADS]),
    ("phimoe", &[KV_HEADS]),
    ("qwen2_moe", &[KV_HEADS]),
    ("qwen3", &[KV_HEADS, HEAD_DIM]),
    ("qwen3_moe", &[KV_HEADS]),
    ("qwen3_next", &[KV_HEADS, HEAD_DIM]),
];

const KV_HEADS: &[&str] = &["num_key_value_heads"];
const HEAD_DIM: &[&str] = &["head_dim"];
const WINDOW: &[&str] = &["sliding_window"];
const SHARED: &[&str] = &["n_shared_experts", "num_shared_experts"];
const OF_DEEPSEEK: &[&[&str]] = &[&["q_lora_rank"], SHARED];

/// Wrappers of a language model with other towers: what their nested model is, where its own
/// configuration does not say.
const WRAPPERS: &[(&str, &str)] = &[
    ("kimi_k25", "kimi_k2"),
    ("llama4", "llama4_text"),
    ("qwen3_vl_moe", "qwen3_moe"),
];

/// Types of nested models that are another type's model under another name.
const ALIASES: &[(&str, &str)] = &[("qwen3_vl_moe_text", "qwen3_moe")];

/// The `model_type`s that are read.
pub fn model_types() -> impl Iterator<Item = &'static str> {
    READERS.iter().map(|(name, _)| *name)
}

/// Reads a `config.json`, or the one in a folder.
pub fn read(path: &Path) -> Result<Model, ModelError> {
    let file = if path.is_dir() {
        path.join("config.json")
    } else {
        path.to_path_buf()
    };
    let shown = file.display().to_string();
    let text = std::fs::read_to_string(&file).map_err(|source| ModelError::Io {
        file: shown.clone(),
        source,
    })?;
    let mut model = parse(&shown, &text)?;
    model.name = name_of(&file);
    Ok(model)
}

/// Reads the text of a configuration. `source` names it in messages and becomes the model's name.
pub fn parse(source: &str, text: &str) -> Result<Model, ModelError> {
    let value: Value = serde_json::from_str(text).map_err(|error| ModelError::Json {
        file: source.to_owned(),
        source: error,
    })?;
    let Value::Object(map) = &value else {
        return Err(ModelError::Value {
            file: source.to_owned(),
            key: "(the whole file)".to_owned(),
            found: "not an object".to_owned(),
            expected: "a JSON object with a `model_type`".to_owned(),
        });
    };
    let mut model = lower(&Keys::new(source, map))?;
    source.clone_into(&mut model.name);
    Ok(model)
}

fn lower(top: &Keys<'_>) -> Result<Model, ModelError> {
    let outer = top.opt_str(&["model_type"])?;
    let text = match top.nested("text_config")? {
        None => top.nested("llm_config")?,
        found => found,
    };
    let keys = text.as_ref().unwrap_or(top);
    let stated = match &text {
        Some(keys) => keys.opt_str(&["model_type"])?,
        None => None,
    };
    let found = stated
        .or_else(|| outer.map(|name| renamed(WRAPPERS, name)))
        .ok_or_else(|| {
            let known: Vec<&str> = model_types().collect();
            top.missing(&["model_type"], &format!("one of {}", known.join(", ")))
        })?;
    let wanted = renamed(ALIASES, found);
    let reader = READERS
        .iter()
        .find_map(|(name, reader)| (*name == wanted).then_some(*reader))
        .ok_or_else(|| unknown_type(top.file(), found))?;
    let own = STATED.iter().filter(|(name, _)| *name == wanted);
    for names in own.flat_map(|(_, stated)| *stated) {
        keys.expect_stated(names)?;
    }
    let mut model = reader(keys)?;
    if !keys.has(TIED) {
        model.tied_embeddings = top.bool_or(TIED, false)?;
    }
    outer.unwrap_or(found).clone_into(&mut model.model_type);
    model.check().map_err(|broken| ModelError::Value {
        file: top.file().to_owned(),
        key: broken.key,
        found: broken.found,
        expected: broken.expected,
    })?;
    Ok(model)
}

fn renamed<'a>(table: &[(&str, &'a str)], name: &'a str) -> &'a str {
    table
        .iter()
        .find_map(|(from, to)| (*from == name).then_some(*to))
        .unwrap_or(name)
}

fn unknown_type(file: &str, found: &str) -> ModelError {
    let known: Vec<&str> = model_types().collect();
    ModelError::UnknownType {
        file: file.to_owned(),
        found: found.to_owned(),
        nearest: closest(found, known.iter().copied()).join(", "),
        known: known.join(", "),
    }
}

/// A file's name for its model: its own, or its folder's where it is called `config.json`.
fn name_of(file: &Path) -> String {
    let named = if file.file_name().is_some_and(|name| name == "config.json") {
        let folder = file.parent().filter(|folder| folder.file_name().is_some());
        folder.and_then(Path::file_name)
    } else {
        file.file_stem()
    };
    named.map_or_else(
        || "model".to_owned(),
        |name| name.to_string_lossy().into_owned(),
    )
}
