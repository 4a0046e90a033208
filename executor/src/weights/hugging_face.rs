//! Reads Hugging Face checkpoints: `model.safetensors`, or the files that
//! `model.safetensors.index.json` names.
//!
//! Headers are read when a checkpoint is opened and compared with what the model needs; everything
//! missing, misshaped or unexpected is reported at once. Values are read later, region by region,
//! at their positions in the files. f32, bf16 and f16 become f32.
//!
//! Experts may be stored one by one or fused: `experts.gate_up_proj [E, 2f, h]`, gate rows over up
//! rows, and `experts.down_proj [E, h, f]`, as transformers 5 holds them in memory
//! (`modeling_mixtral.py`, `modeling_qwen3_moe.py`); Mixtral's block is then called `mlp`.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::fs::File;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};

use safetensors::tensor::Dtype;
use serde::Deserialize;

use super::region::{GlobalTensor, Region};
use super::save::SUMS;
use super::stored::{Stored, read_header};
use crate::error::Error;
use crate::sums;

/// Files of weights: all of them, or an index of several.
const FILES: [&str; 2] = ["model.safetensors", "model.safetensors.index.json"];
/// How the tensors end that experts of GPT-OSS are published as: 4-bit numbers, and a scale for 32 of them.
const MXFP4: &str = "_proj_blocks";

/// Tensors named in one error, of each kind.
const NAMED_MAX: usize = 6;

/// Bytes at one place of a file by which ranks tell weights from others, and how many such places there are.
const MARKED: usize = 256;
const MARKS: u64 = 1024;

/// An open checkpoint, proven to hold a model's tensors.
#[derive(Debug)]
pub struct HuggingFace {
    dir: PathBuf,
    files: Vec<(PathBuf, File)>,
    locations: BTreeMap<String, Location>,
}

/// Where a global tensor lies.
#[derive(Debug, Clone)]
struct Location {
    file: usize,
    dtype: Dtype,
    /// Position of its first element in the file, bytes.
    at: u64,
}

#[derive(Deserialize)]
struct ShardIndex {
    weight_map: BTreeMap<String, String>,
}

impl HuggingFace {
    /// Whether a folder has weights, whatever else.
    pub fn are_in(dir: &Path) -> bool {
        FILES.iter().any(|name| dir.join(name).is_file())
    }

    /// Opens the folder `dir` and checks that it holds exactly the tensors `expected`.
    pub fn open(dir: &Path, expected: &[GlobalTensor]) -> Result<Self, Error> {
        let mut files = Vec::new();
        let mut stored = BTreeMap::new();
        for path in shard_paths(dir)? {
            let file = File::open(&path).map_err(Error::io(&path, "open"))?;
            read_header(&path, &file, files.len(), &mut stored)?;
            files.push((path, file));
        }
        if let Some(name) = stored.keys().find(|name| name.ends_with(MXFP4)) {
            let reason = format!(
                "holds experts in MXFP4 ({name}), which is not implemented; bf16, f16 and f32 safetensors work, as \
                 transformers saves a model that it has loaded with Mxfp4Config(dequantize=True)"
            );
            return Err(Error::malformed(dir, reason));
        }
        // How many experts each fused tensor would hold.
        let mut experts = BTreeMap::new();
        for part in expected.iter().filter_map(|t| FusedPart::of(&t.name)) {
            let count: &mut usize = experts.entry(part.name).or_default();
            *count = (*count).max(part.expert + 1);
        }
        let mut locations = BTreeMap::new();
        let mut used = BTreeSet::new();
        let mut missing = Vec::new();
        let mut wrong = Vec::new();
        for tensor in expected {
            match locate(tensor, &stored, &experts) {
                Located::At(name, location) => {
                    used.insert(name);
                    locations.insert(tensor.name.clone(), location);
                }
                Located::Wrong(name, reason) => {
                    used.insert(name.clone());
                    // A fused tensor is wrong once, not once per expert.
                    let reason = format!("{name} {reason}");
                    if !wrong.contains(&reason) {
                        wrong.push(reason);
                    }
                }
                Located::Nowhere => missing.push(tensor.name.clone()),
            }
        }
        let unexpected: Vec<String> = stored
            .keys()
            .filter(|name| !used.contains(*name) && !is_derived(name))
            .cloned()
            .collect();
        let mut reason = String::new();
        for (what, names) in [
            ("missing", missing),
            ("misshaped", wrong),
            ("unexpected", unexpected),
        ] {
            if !names.is_empty() {
                let separator = if reason.is_empty() { "" } else { "; " };
                let shown = &names[..names.len().min(NAMED_MAX)];
                let _ = write!(
                    reason,
                    "{separator}{} {what}: {}",
                    names.len(),
                    shown.join(", ")
                );
                if names.len() > NAMED_MAX {
                    let _ = write!(reason, " and {} more", names.len() - NAMED_MAX);
                }
            }
        }
        if reason.is_empty() {
            Ok(Self {
                dir: dir.to_owned(),
                files,
                locations,
            })
        } else {
            let reason = format!("does not hold the weights of this model: {reason}");
            Err(Error::malformed(dir, reason))
        }
    }

    /// The folder.
    pub(crate) fn dir(&self) -> &Path {
        &self.dir
    }

    /// Refuses files that do not hold what was written, where sums lie beside them. All are read.
    pub(crate) fn verify(&self) -> Result<(), Error> {
        sums::check(&self.dir.join(SUMS), &|_| false).map(drop)
    }

    /// A hash of the lengths of the files and of some bytes at so many places of each, the end among them.
    pub(crate) fn mark(&self) -> Result<String, Error> {
        let mut hash = blake3::Hasher::new();
        for (path, file) in &self.files {
            let len = file.metadata().map_err(Error::io(path, "read"))?.len();
            hash.update(&len.to_le_bytes());
            let stride = (len / MARKS).max(MARKED as u64);
            let places = (0..len).step_by(stride as usize);
            for at in places.chain([len.saturating_sub(MARKED as u64)]) {
                let mut bytes = [0; MARKED];
                let read = file
                    .read_at(&mut bytes, at)
                    .map_err(Error::io(path, "read"))?;
                hash.update(&bytes[..read]);
            }
        }
        Ok(hash.finalize().to_hex()[..16].to_owned())
    }

    /// The values of a region, row by row.
    pub fn read(&self, region: &Region<'_>) -> Result<Vec<f32>, Error> {
        let location = &self.locations[region.tensor];
        let (path, file) = &self.files[location.file];
        let (width, size) = (region.width(), location.dtype.bitsize() / 8);
        let mut bytes = vec![0; region.rows.len() * width * size];
        let at = location.at + (region.rows.start * width * size) as u64;
        file.read_exact_at(&mut bytes, at)
            .map_err(Error::io(path, "read"))?;
        let values = decode(location.dtype, &bytes);
        if region.cols == (0..width) {
            return Ok(values);
        }
        let rows = values.chunks(width);
        Ok(rows
            .flat_map(|row| &row[region.cols.clone()])
            .copied()
            .collect())
    }
}

/// The safetensors files of a folder.
fn shard_paths(dir: &Path) -> Result<Vec<PathBuf>, Error> {
    let [single, index] = FILES.map(|name| dir.join(name));
    if single.is_file() {
        return Ok(vec![single]);
    }
    if !index.is_file() {
        let [single, index] = FILES;
        let reason = if dir.exists() {
            format!("is not a checkpoint: it has neither {single} nor {index}")
        } else {
            format!("does not exist; expected a folder with {single} or {index}")
        };
        return Err(Error::malformed(dir, reason));
    }
    let text = std::fs::read_to_string(&index).map_err(Error::io(&index, "read"))?;
    let parsed: ShardIndex = serde_json::from_str(&text)
        .map_err(|error| Error::malformed(&index, format!("is not a shard index: {error}")))?;
    let names: BTreeSet<String> = parsed.weight_map.into_values().collect();
    if let Some(name) = names.iter().find(|name| name.contains(['/', '\\'])) {
        let reason = format!("names the file {name:?}; expected files beside it");
        return Err(Error::malformed(&index, reason));
    }
    Ok(names.into_iter().map(|name| dir.join(name)).collect())
}

enum Located {
    /// In this stored tensor, from this location on.
    At(String, Location),
    /// This stored tensor should hold it and does not.
    Wrong(String, String),
    Nowhere,
}

/// Finds a global tensor among the stored ones, by its own name or inside a fused tensor.
fn locate(
    tensor: &GlobalTensor,
    stored: &BTreeMap<String, Stored>,
    experts: &BTreeMap<String, usize>,
) -> Located {
    let own = [
        tensor.name.clone(),
        tensor.name.replace(".block_sparse_moe.", ".mlp."),
    ];
    for name in own {
        if let Some(found) = stored.get(&name) {
            return place_in(found, name, &tensor.dims, 0);
        }
    }
    if let Some(part) = FusedPart::of(&tensor.name)
        && let Some(found) = stored.get(&part.name)
        && let [rows, cols] = *tensor.dims
    {
        let rows_each = part.halves * rows;
        let experts = experts[&part.name];
        let first = (part.expert * rows_each + part.half * rows) * cols;
        return place_in(found, part.name, &[experts, rows_each, cols], first);
    }
    Located::Nowhere
}

/// A tensor `first` elements into a stored one of shape `shape`.
fn place_in(found: &Stored, name: String, shape: &[usize], first: usize) -> Located {
    if found.shape != shape {
        let reason = format!("is {:?}, expected {shape:?}", found.shape);
        return Located::Wrong(name, reason);
    }
    if !matches!(found.dtype, Dtype::F32 | Dtype::BF16 | Dtype::F16) {
        let reason = format!("is {:?}, expected F32, BF16 or F16", found.dtype);
        return Located::Wrong(name, reason);
    }
    let location = Location {
        file: found.file,
        dtype: found.dtype,
        at: found.at + (first * found.dtype.bitsize() / 8) as u64,
    };
    Located::At(name, location)
}

/// The part of a fused expert tensor that one expert's matrix is.
struct FusedPart {
    name: String,
    expert: usize,
    /// Matrices of this kind that one expert's rows hold.
    halves: usize,
    /// Which of them.
    half: usize,
}

impl FusedPart {
    /// From `PREFIX.experts.E.PROJECTION.weight`.
    fn of(name: &str) -> Option<Self> {
        let (prefix, rest) = name.split_once(".experts.")?;
        let (expert, projection) = rest.split_once('.')?;
        let (fused, halves, half) = match projection {
            "gate_proj.weight" | "w1.weight" => ("gate_up_proj", 2, 0),
            "up_proj.weight" | "w3.weight" => ("gate_up_proj", 2, 1),
            "down_proj.weight" | "w2.weight" => ("down_proj", 1, 0),
            _ => return None,
        };
        let block = prefix.rsplit_once('.').map_or("", |(block, _)| block);
        Some(Self {
            name: format!("{block}.mlp.experts.{fused}"),
            expert: expert.parse().ok()?,
            halves,
            half,
        })
    }
}

/// Buffers that old checkpoints stored and every model computes; copies of the embedding and the head beside a
/// depth of multi-token prediction, which shares them.
fn is_derived(name: &str) -> bool {
    let of_layer = name.starts_with("model.layers.");
    let copies = [".embed_tokens.weight", ".shared_head.head.weight"];
    name.ends_with(".rotary_emb.inv_freq")
        || (of_layer && copies.iter().any(|copy| name.ends_with(copy)))
}

fn decode(dtype: Dtype, bytes: &[u8]) -> Vec<f32> {
    fn each<const N: usize>(bytes: &[u8], of: impl Fn([u8; N]) -> f32) -> Vec<f32> {
        bytes.as_chunks::<N>().0.iter().map(|&b| of(b)).collect()
    }
    match dtype {
        Dtype::F32 => each(bytes, f32::from_le_bytes),
        Dtype::BF16 => each(bytes, |b| {
            f32::from_bits(u32::from(u16::from_le_bytes(b)) << 16)
        }),
        Dtype::F16 => each(bytes, |b| half_to_f32(u16::from_le_bytes(b))),
        other => unreachable!("{other:?} was refused when the checkpoint was opened"),
    }
}

/// IEEE binary16 to binary32, exactly.
fn half_to_f32(half: u16) -> f32 {
    let sign = if half >> 15 == 1 { -1.0 } else { 1.0 };
    let exponent = i32::from(half >> 10 & 0x1f);
    let fraction = f32::from(half & 0x3ff);
    sign * match exponent {
        0 => fraction * 2.0_f32.powi(-24),
        31 if fraction == 0.0 => f32::INFINITY,
        31 => f32::NAN,
        _ => (1024.0 + fraction) * 2.0_f32.powi(exponent - 25),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use safetensors::tensor::TensorView;

    fn folder() -> tempfile::TempDir {
        tempfile::tempdir().expect("a temporary folder")
    }

    fn tensor(name: &str, dims: &[usize]) -> GlobalTensor {
        GlobalTensor {
            name: name.to_owned(),
            dims: dims.to_vec(),
        }
    }

    /// Numbers from `first` on, as f32 bytes.
    fn counting(first: u16, dims: &[usize]) -> Vec<u8> {
        let len: usize = dims.iter().product();
        (0..len)
            .flat_map(|i| (f32::from(first) + i as f32).to_le_bytes())
            .collect()
    }

    fn write(path: &Path, tensors: &[(&str, Dtype, &[usize], Vec<u8>)]) {
        let views = tensors.iter().map(|(name, dtype, shape, bytes)| {
            let view = TensorView::new(*dtype, shape.to_vec(), bytes);
            (*name, view.expect("bytes fit the shape"))
        });
        safetensors::serialize_to_file(views, None, path).expect("writes");
    }

    #[test]
    fn regions_of_all_float_types_are_read_in_place() {
        let folder = folder();
        let bf16 = [0x3f80_u16, 0xc000, 0x0000].map(u16::to_le_bytes).concat();
        let f16 = [0x3c00_u16, 0xc000, 0x0001, 0x7c00]
            .map(u16::to_le_bytes)
            .concat();
        write(
            &folder.path().join("model.safetensors"),
            &[
                ("m", Dtype::F32, &[3, 4], counting(0, &[3, 4])),
                ("b", Dtype::BF16, &[3], bf16),
                ("h", Dtype::F16, &[2, 2], f16),
            ],
        );
        let expected = [
            tensor("m", &[3, 4]),
            tensor("b", &[3]),
            tensor("h", &[2, 2]),
        ];
        let checkpoint = HuggingFace::open(folder.path(), &expected).expect("complete");
        let read = |region: &Region<'_>| checkpoint.read(region).expect("reads");
        let part = Region {
            rows: 1..3,
            cols: 1..3,
            ..expected[0].whole()
        };
        assert_eq!(read(&part), [5.0, 6.0, 9.0, 10.0]);
        let tail = Region {
            rows: 1..3,
            ..expected[1].whole()
        };
        assert_eq!(read(&tail), [-2.0, 0.0]);
        let smallest = 2.0_f32.powi(-24);
        assert_eq!(
            read(&expected[2].whole()),
            [1.0, -2.0, smallest, f32::INFINITY]
        );
    }

    #[test]
    fn experts_are_found_one_by_one_and_fused_under_both_block_names() {
        let (h, f) = (2, 3);
        let names = |e: usize| {
            let name = |p: &str| format!("model.layers.0.block_sparse_moe.experts.{e}.{p}.weight");
            [
                tensor(&name("w1"), &[f, h]),
                tensor(&name("w3"), &[f, h]),
                tensor(&name("w2"), &[h, f]),
            ]
        };
        let router = tensor("model.layers.0.block_sparse_moe.gate.weight", &[2, h]);
        let mut expected: Vec<GlobalTensor> = (0..2).flat_map(names).collect();
        expected.push(router.clone());

        let fused = folder();
        write(
            &fused.path().join("model.safetensors"),
            &[
                (
                    "model.layers.0.mlp.experts.gate_up_proj",
                    Dtype::F32,
                    &[2, 2 * f, h],
                    counting(0, &[2, 2 * f, h]),
                ),
                (
                    "model.layers.0.mlp.experts.down_proj",
                    Dtype::F32,
                    &[2, h, f],
                    counting(100, &[2, h, f]),
                ),
                (
                    "model.layers.0.mlp.gate.weight",
                    Dtype::F32,
                    &[2, h],
                    counting(200, &[2, h]),
                ),
            ],
        );
        let checkpoint = HuggingFace::open(fused.path(), &expected).expect("complete");
        let read = |t: &GlobalTensor| checkpoint.read(&t.whole()).expect("reads");
        let [gate, up, down] = names(1);
        assert_eq!(read(&gate), [12.0, 13.0, 14.0, 15.0, 16.0, 17.0]);
        assert_eq!(read(&up), [18.0, 19.0, 20.0, 21.0, 22.0, 23.0]);
        assert_eq!(read(&down), [106.0, 107.0, 108.0, 109.0, 110.0, 111.0]);
        assert_eq!(read(&router), [200.0, 201.0, 202.0, 203.0]);
        let column = Region {
            cols: 1..2,
            ..down.whole()
        };
        assert_eq!(checkpoint.read(&column).expect("reads"), [107.0, 110.0]);

        let fewer: Vec<GlobalTensor> = expected
            .iter()
            .filter(|t| !t.name.contains("experts.1"))
            .cloned()
            .collect();
        let refused = HuggingFace::open(fused.path(), &fewer).expect_err("one expert too many");
        let text = refused.to_string();
        assert!(
            text.contains("gate_up_proj is [2, 6, 2], expected [1, 6, 2]"),
            "{text}"
        );

        // The same, one by one and in two files.
        let split = folder();
        let mut map = serde_json::Map::new();
        for (e, file) in ["a.safetensors", "b.safetensors"].into_iter().enumerate() {
            let mut tensors: Vec<GlobalTensor> = names(e).to_vec();
            if e == 1 {
                tensors.push(router.clone());
            }
            let views: Vec<_> = tensors
                .iter()
                .map(|t| (&*t.name, Dtype::F32, &*t.dims, counting(e as u16, &t.dims)))
                .collect();
            write(&split.path().join(file), &views);
            map.extend(tensors.iter().map(|t| (t.name.clone(), file.into())));
        }
        let index = serde_json::json!({"metadata": {}, "weight_map": map});
        let path = split.path().join("model.safetensors.index.json");
        std::fs::write(path, index.to_string()).expect("writes");
        let checkpoint = HuggingFace::open(split.path(), &expected).expect("complete");
        let up = checkpoint.read(&names(1)[1].whole()).expect("reads");
        assert_eq!(up, [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]);
    }

    #[test]
    fn missing_misshaped_and_unexpected_tensors_are_reported_together() {
        let folder = folder();
        write(
            &folder.path().join("model.safetensors"),
            &[
                ("a", Dtype::F32, &[2], counting(0, &[2])),
                ("b", Dtype::F32, &[2, 3], counting(0, &[2, 3])),
                ("c", Dtype::I32, &[1], vec![0; 4]),
                ("x", Dtype::F32, &[1], vec![0; 4]),
                ("model.rotary_emb.inv_freq", Dtype::F32, &[1], vec![0; 4]),
            ],
        );
        let mut expected = vec![tensor("a", &[2]), tensor("b", &[3, 2]), tensor("c", &[1])];
        expected.extend((0..8).map(|i| tensor(&format!("m{i}"), &[1])));
        let error = HuggingFace::open(folder.path(), &expected).expect_err("incomplete");
        let text = error.to_string();
        assert!(
            text.ends_with(
                "does not hold the weights of this model: \
                 8 missing: m0, m1, m2, m3, m4, m5 and 2 more; \
                 2 misshaped: b is [2, 3], expected [3, 2], c is I32, expected F32, BF16 or F16; \
                 1 unexpected: x"
            ),
            "{text}"
        );
        assert!(error.is_bad_request());
    }

    #[test]
    fn experts_in_four_bits_are_refused_with_what_works() {
        let folder = folder();
        let blocks = "model.layers.0.mlp.experts.gate_up_proj_blocks";
        write(
            &folder.path().join("model.safetensors"),
            &[(blocks, Dtype::U8, &[2, 4, 1, 16], vec![0; 128])],
        );
        let error = HuggingFace::open(folder.path(), &[]).expect_err("four bits");
        for part in ["MXFP4", blocks, "bf16", "dequantize=True"] {
            assert!(error.to_string().contains(part), "{error} lacks {part}");
        }
    }

    #[test]
    fn damaged_files_are_refused_by_name() {
        let folder = folder();
        let none = HuggingFace::open(folder.path(), &[]).expect_err("empty");
        assert!(
            none.to_string().contains("neither model.safetensors nor"),
            "{none}"
        );
        let path = folder.path().join("model.safetensors");
        write(&path, &[("a", Dtype::F32, &[4], counting(0, &[4]))]);
        let whole = std::fs::read(&path).expect("there");
        let check = |bytes: &[u8], expected: &str| {
            std::fs::write(&path, bytes).expect("writes");
            let text = HuggingFace::open(folder.path(), &[])
                .expect_err("refused")
                .to_string();
            assert!(
                text.contains("model.safetensors: ") && text.contains(expected),
                "{text}"
            );
        };
        check(&whole[..5], "holds 5 bytes; a safetensors file begins");
        check(&whole[..20], "announces a header of");
        check(&whole[..whole.len() - 1], "by its header");
        check(
            &[&8_u64.to_le_bytes(), &b"notjson!"[..]].concat(),
            "has no valid safetensors header",
        );
    }

    #[test]
    fn law_half_precision_decodes_every_value() {
        // Against the definition: sign, five exponent bits, ten fraction bits.
        for bits in 0..=u16::MAX {
            let value = half_to_f32(bits);
            let (exponent, fraction) = (i32::from(bits >> 10 & 0x1f), f64::from(bits & 0x3ff));
            let magnitude = match exponent {
                0 => fraction / 1024.0 * 2_f64.powi(-14),
                31 => continue,
                _ => (1.0 + fraction / 1024.0) * 2_f64.powi(exponent - 15),
            };
            assert_eq!(f64::from(value.abs()), magnitude);
            assert_eq!(value.is_sign_negative(), bits >> 15 == 1);
        }
    }
}
