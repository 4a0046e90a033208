//! Headers of safetensors files: which tensors a file holds, and where in it.

use std::collections::{BTreeMap, HashMap};
use std::fs::File;
use std::os::unix::fs::FileExt as _;
use std::path::Path;

use safetensors::tensor::{Dtype, Metadata, TensorInfo};

use crate::error::Error;

/// Longest header the format allows, bytes (safetensors specification).
const HEADER_BYTES_MAX: u64 = 100_000_000;

/// A tensor as a file stores it.
#[derive(Debug)]
pub(crate) struct Stored {
    /// The number that its file was given.
    pub(crate) file: usize,
    /// Type of an element.
    pub(crate) dtype: Dtype,
    /// Its shape.
    pub(crate) shape: Vec<usize>,
    /// Position of its first element in the file, bytes.
    pub(crate) at: u64,
}

/// The header of a file of f32 tensors that lie in it one after the other, its length before it, padded to a
/// multiple of eight bytes.
pub(crate) fn header(
    metadata: Option<HashMap<String, String>>,
    tensors: impl IntoIterator<Item = (String, Vec<usize>)>,
) -> Vec<u8> {
    let mut at = 0;
    let placed = tensors.into_iter().map(|(name, shape)| {
        let start = at;
        at += shape.iter().product::<usize>() * size_of::<f32>();
        let info = TensorInfo {
            dtype: Dtype::F32,
            shape,
            data_offsets: (start, at),
        };
        (name, info)
    });
    let metadata = Metadata::new(metadata, placed.collect()).expect("tensors follow each other");
    let mut header = serde_json::to_vec(&metadata).expect("names are text");
    header.resize(header.len().next_multiple_of(8), b' ');
    [&(header.len() as u64).to_le_bytes()[..], &header].concat()
}

/// Adds the tensors of one file to `stored`.
pub(crate) fn read_header(
    path: &Path,
    file: &File,
    number: usize,
    stored: &mut BTreeMap<String, Stored>,
) -> Result<(), Error> {
    let bad = |reason: String| Error::malformed(path, reason);
    let found = file.metadata().map_err(Error::io(path, "measure"))?.len();
    let mut length = [0; 8];
    if found < 8 {
        return Err(bad(format!(
            "holds {found} bytes; a safetensors file begins with a header length of 8"
        )));
    }
    file.read_exact_at(&mut length, 0)
        .map_err(Error::io(path, "read"))?;
    let length = u64::from_le_bytes(length);
    if length > HEADER_BYTES_MAX || length > found - 8 {
        return Err(bad(format!(
            "announces a header of {length} bytes in a file of {found}; \
             it is cut short or no safetensors file"
        )));
    }
    let mut header = vec![0; length as usize];
    file.read_exact_at(&mut header, 8)
        .map_err(Error::io(path, "read"))?;
    let metadata: Metadata = serde_json::from_slice(&header)
        .map_err(|error| bad(format!("has no valid safetensors header: {error}")))?;
    let expected = 8 + length + metadata.data_len() as u64;
    if found != expected {
        return Err(bad(format!(
            "holds {found} bytes; expected {expected} by its header"
        )));
    }
    for (name, info) in metadata.tensors() {
        let tensor = Stored {
            file: number,
            dtype: info.dtype,
            shape: info.shape.clone(),
            at: 8 + length + info.data_offsets.0 as u64,
        };
        if stored.insert(name.clone(), tensor).is_some() {
            return Err(bad(format!(
                "holds {name}, which an earlier file holds too"
            )));
        }
    }
    Ok(())
}
