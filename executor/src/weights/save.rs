//! [`write_folder`]: a Hugging Face folder of tensors that come block by block; [`Collector`]: gathers a model's
//! tensors from the ranks for it.
//!
//! Ranks put the regions they hold, in any order; a region that several hold is put by one of them.
//! Nothing is written until every element of every tensor has been put once.

use std::collections::BTreeMap;
use std::io::{self, Write as _};
use std::path::Path;
use std::sync::{Mutex, PoisonError};

use moefold_planner::model::Model;
use serde_json::{Value, json};

use super::region::{GlobalTensor, Region, check_finite};
use super::stored::header;
use crate::error::Error;
use crate::files::{write_atomically, write_directory, write_json};
use crate::model::global_tensors;
use crate::sums::{self, Hashed};

/// Values of tensors, so many elements at a time, in the order of files.
pub(crate) struct Blocks<'a> {
    /// Most elements of a block; a row is read whole.
    pub(crate) elements: usize,
    /// The values of a region, row by row.
    pub(crate) read: &'a dyn Fn(&Region<'_>) -> Result<Vec<f32>, Error>,
}

impl Blocks<'_> {
    /// Gives `take` the values of a tensor, block by block.
    pub(crate) fn each(
        &self,
        tensor: &GlobalTensor,
        take: &mut dyn FnMut(&[f32]) -> Result<(), Error>,
    ) -> Result<(), Error> {
        let [rows, cols] = tensor.matrix();
        let step = (self.elements / cols.max(1)).max(1);
        for first in (0..rows).step_by(step) {
            let region = Region {
                rows: first..(first + step).min(rows),
                ..tensor.whole()
            };
            take(&(self.read)(&region)?)?;
        }
        Ok(())
    }
}

/// Bytes of tensors in one file, at most, where a tensor is not larger: what transformers writes too.
pub(crate) const FILE_BYTES: u64 = 5_000_000_000;

/// Checksums of the files of weights, beside them, as the program `b3sum` reads them.
pub(super) const SUMS: &str = "weights.blake3";

/// Bytes of a model's tensors as [`Collector::save`] writes them.
pub fn saved_bytes(model: &Model) -> u64 {
    let tensors = global_tensors(model);
    let elements: usize = tensors.iter().map(GlobalTensor::len).sum();
    (elements * size_of::<f32>()) as u64
}

/// Writes `config.json` and the tensors in f32 into the folder `dir`, which is made if need be: as
/// `model.safetensors`, or where they are more than `file_bytes` as several files with their index.
pub(crate) fn write_folder(
    dir: &Path,
    config: &Value,
    tensors: &[GlobalTensor],
    file_bytes: u64,
    blocks: &Blocks<'_>,
) -> Result<(), Error> {
    std::fs::create_dir_all(dir).map_err(Error::io(dir, "create"))?;
    let bytes = |tensor: &GlobalTensor| (tensor.len() * size_of::<f32>()) as u64;
    let mut files: Vec<&[GlobalTensor]> = Vec::new();
    let mut rest = tensors;
    while !rest.is_empty() {
        let mut sum = 0;
        let fits = rest.iter().take_while(|tensor| {
            sum += bytes(tensor);
            sum <= file_bytes
        });
        let (file, others) = rest.split_at(fits.count().max(1));
        files.push(file);
        rest = others;
    }
    let name = |number: usize| match files.len() {
        1 => "model.safetensors".to_owned(),
        all => format!("model-{:05}-of-{all:05}.safetensors", number + 1),
    };
    let mut written = Vec::new();
    for (number, file) in files.iter().enumerate() {
        let hash = write_file(&dir.join(name(number)), file, blocks)?;
        written.push((name(number), hash));
    }
    if files.len() > 1 {
        let named = |(number, file): (usize, &&[GlobalTensor])| {
            let names = file.iter().map(|tensor| tensor.name.clone());
            names
                .map(|tensor| (tensor, name(number)))
                .collect::<Vec<_>>()
        };
        let map: BTreeMap<String, String> = files.iter().enumerate().flat_map(named).collect();
        let total: u64 = tensors.iter().map(bytes).sum();
        let index = json!({"metadata": {"total_size": total}, "weight_map": map});
        write_json(&dir.join("model.safetensors.index.json"), &index)?;
    }
    write_json(&dir.join("config.json"), config)?;
    sums::write(&dir.join(SUMS), &written)
}

/// Writes one file; its hash.
fn write_file(path: &Path, tensors: &[GlobalTensor], blocks: &Blocks<'_>) -> Result<String, Error> {
    // transformers refuses files that do not say which framework's layout they have.
    let metadata = BTreeMap::from([("format".to_owned(), "pt".to_owned())]);
    let entries = tensors
        .iter()
        .map(|tensor| (tensor.name.clone(), tensor.dims.clone()));
    let header = header(Some(metadata.into_iter().collect()), entries);
    let (mut failed, mut hash) = (None, String::new());
    let written = write_atomically(path, |out| {
        let mut out = Hashed::new(out);
        out.write_all(&header)?;
        for tensor in tensors {
            let done = blocks.each(tensor, &mut |values| {
                let written = out.write_all(bytemuck::cast_slice(values));
                written.map_err(Error::io(path, "write"))
            });
            if let Err(error) = done {
                failed = Some(error);
                return Err(io::ErrorKind::Other.into());
            }
        }
        hash = out.hex();
        Ok(())
    });
    match failed {
        Some(error) => Err(error),
        None => written.map(|()| hash),
    }
}

/// Tensors on their way to a checkpoint. Shared by the ranks of a process.
#[derive(Debug, Default)]
pub struct Collector(Mutex<BTreeMap<String, Gathered>>);

#[derive(Debug)]
struct Gathered {
    dims: Vec<usize>,
    values: Vec<f32>,
    num_put: usize,
}

impl Collector {
    /// A collector without tensors.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds the values of a region, row by row. Each element is put once.
    pub fn put(&self, region: &Region<'_>, values: &[f32]) {
        assert_eq!(values.len(), region.len(), "values of {region:?}");
        let mut tensors = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let gathered = tensors
            .entry(region.tensor.to_owned())
            .or_insert_with(|| Gathered {
                dims: region.dims.to_vec(),
                values: vec![0.0; region.dims.iter().product()],
                num_put: 0,
            });
        assert_eq!(
            gathered.dims, region.dims,
            "{} changed shape",
            region.tensor
        );
        gathered.num_put += values.len();
        let width = region.width();
        for (row, values) in region
            .rows
            .clone()
            .zip(values.chunks(region.cols.len().max(1)))
        {
            let at = row * width + region.cols.start;
            gathered.values[at..at + values.len()].copy_from_slice(values);
        }
    }

    /// The values of a tensor that was put in full.
    pub fn get(&self, tensor: &GlobalTensor) -> Vec<f32> {
        let tensors = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let gathered = tensors
            .get(&tensor.name)
            .unwrap_or_else(|| panic!("{} was not put", tensor.name));
        assert_complete(&tensor.name, gathered);
        gathered.values.clone()
    }

    /// The tensors that were put, by name.
    pub fn tensors(&self) -> Vec<GlobalTensor> {
        let tensors = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        tensors.iter().map(described).collect()
    }

    /// Writes them as [`write_folder`] does, all or nothing.
    pub fn save(self, dir: &Path, config: &Value) -> Result<(), Error> {
        let tensors = self.0.into_inner().unwrap_or_else(PoisonError::into_inner);
        for (name, gathered) in &tensors {
            assert_complete(name, gathered);
            check_finite(name, "weights", &gathered.values)?;
        }
        let named: Vec<GlobalTensor> = tensors.iter().map(described).collect();
        let read = |region: &Region<'_>| {
            let (values, width) = (&tensors[region.tensor].values, region.width());
            Ok(values[region.rows.start * width..region.rows.end * width].to_vec())
        };
        let blocks = Blocks {
            elements: 1 << 20,
            read: &read,
        };
        write_directory(dir, |dir| {
            write_folder(dir, config, &named, FILE_BYTES, &blocks)
        })
    }
}

fn described((name, gathered): (&String, &Gathered)) -> GlobalTensor {
    GlobalTensor {
        name: name.clone(),
        dims: gathered.dims.clone(),
    }
}

fn assert_complete(name: &str, gathered: &Gathered) {
    assert_eq!(
        gathered.num_put,
        gathered.values.len(),
        "{name} was put in part, or in part twice"
    );
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::weights::Source;

    #[test]
    fn law_what_is_saved_from_parts_is_read_back_whole() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let source = Source::Random { seed: 3, std: 0.5 };
        let matrix = GlobalTensor {
            name: "m".to_owned(),
            dims: vec![5, 4],
        };
        let norm = GlobalTensor {
            name: "n".to_owned(),
            dims: vec![3],
        };
        let collector = Collector::new();
        std::thread::scope(|scope| {
            for (rows, cols) in [(0..2, 0..4), (2..5, 0..1), (2..5, 1..4)] {
                let (collector, source, matrix) = (&collector, &source, &matrix);
                scope.spawn(move || {
                    let region = Region {
                        rows,
                        cols,
                        ..matrix.whole()
                    };
                    collector.put(&region, &source.read(&region).expect("random"));
                });
            }
        });
        collector.put(&norm.whole(), &[1.0, 2.0, 3.0]);
        let expected = source.read(&matrix.whole()).expect("random");
        assert_eq!(collector.get(&matrix), expected);
        let tensors = collector.tensors();
        assert_eq!(tensors, [matrix.clone(), norm.clone()]);
        let dir = folder.path().join("new/folder");
        let config = serde_json::json!({"model_type": "none"});
        collector.save(&dir, &config).expect("saves");
        let saved = Source::hugging_face(&dir, &tensors).expect("complete");
        assert_eq!(saved.read(&matrix.whole()).expect("reads"), expected);
        assert_eq!(saved.read(&norm.whole()).expect("reads"), [1.0, 2.0, 3.0]);
        assert!(dir.join("config.json").is_file());
    }
}
