//! Writes indexed datasets, for tests and for tokenized text.

use std::io::{BufWriter, Write as _};
use std::path::Path;

use super::format::{Element, MAGIC, VERSION, with_ending};
use crate::error::Error;
use crate::files::write_atomically;

/// Writes a dataset of one sequence a document.
pub fn write(prefix: &Path, element: Element, documents: &[&[i32]]) -> Result<(), Error> {
    let bin_path = with_ending(prefix, "bin");
    for (document, ids) in documents.iter().enumerate() {
        if let Some(position) = ids.iter().position(|&id| element.encode(id).is_none()) {
            return Err(Error::malformed(
                &bin_path,
                format!(
                    "token id {} at position {position} of document {document} does not fit {element:?}",
                    ids[position]
                ),
            ));
        }
    }
    write_atomically(&bin_path, |out| {
        let mut out = BufWriter::new(out);
        for &id in documents.iter().copied().flatten() {
            out.write_all(&element.encode(id).expect("checked above"))?;
        }
        out.flush()
    })?;
    write_atomically(&with_ending(prefix, "idx"), |out| {
        out.write_all(&MAGIC)?;
        out.write_all(&VERSION.to_le_bytes())?;
        out.write_all(&[element.code()])?;
        out.write_all(&(documents.len() as u64).to_le_bytes())?;
        out.write_all(&(documents.len() as u64 + 1).to_le_bytes())?;
        for ids in documents {
            out.write_all(&(ids.len() as i32).to_le_bytes())?;
        }
        let mut offset = 0_i64;
        for ids in documents {
            out.write_all(&offset.to_le_bytes())?;
            offset += (ids.len() as u64 * element.bytes()) as i64;
        }
        for boundary in 0..=documents.len() as i64 {
            out.write_all(&boundary.to_le_bytes())?;
        }
        Ok(())
    })
}
