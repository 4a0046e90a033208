//! [`Collector`]: gathers a model's tensors from the ranks and writes a Hugging Face folder.
//!
//! Ranks put the regions they hold, in any order; a region that several hold is put by one of them.
//! Nothing is written until every element of every tensor has been put once.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::{Mutex, PoisonError};

use safetensors::tensor::{Dtype, TensorView};
use serde_json::Value;

use super::region::{GlobalTensor, Region};
use crate::error::Error;
use crate::files::{write_atomically, write_json};

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
        let describe = |(name, gathered): (&String, &Gathered)| GlobalTensor {
            name: name.clone(),
            dims: gathered.dims.clone(),
        };
        tensors.iter().map(describe).collect()
    }

    /// Writes `config.json` and `model.safetensors` into the folder `dir`, which is made if need be.
    pub fn save(self, dir: &Path, config: &Value) -> Result<(), Error> {
        let tensors = self.0.into_inner().unwrap_or_else(PoisonError::into_inner);
        for (name, gathered) in &tensors {
            assert_complete(name, gathered);
        }
        std::fs::create_dir_all(dir).map_err(Error::io(dir, "create"))?;
        let views = tensors.iter().map(|(name, gathered)| {
            let bytes = bytemuck::cast_slice(&gathered.values);
            let view = TensorView::new(Dtype::F32, gathered.dims.clone(), bytes);
            (name, view.expect("as many values as the shape says"))
        });
        // transformers refuses files that do not say which framework's layout they have.
        let metadata = BTreeMap::from([("format".to_owned(), "pt".to_owned())]);
        let path = dir.join("model.safetensors");
        let bytes = safetensors::serialize(views, Some(metadata.into_iter().collect()));
        let bytes = bytes.map_err(|error| Error::malformed(&path, error.to_string()))?;
        write_atomically(&path, |out| out.write_all(&bytes))?;
        write_json(&dir.join("config.json"), config)
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
