//! Writes indexed datasets, document by document.

use std::ffi::OsStr;
use std::io::{self, BufWriter, Write};
use std::ops::ControlFlow;
use std::path::Path;

use super::format::{Element, MAGIC, VERSION, with_ending};
use crate::error::Error;
use crate::files::write_atomically;
use crate::sums::{self, Hashed};

/// A dataset that is being written: ids are on their way to `.bin`, lengths in memory.
pub(in crate::data) struct Documents<'a> {
    path: &'a Path,
    out: BufWriter<&'a mut dyn Write>,
    element: Element,
    lengths: Vec<i32>,
}

impl Documents<'_> {
    /// Adds a document of one sequence.
    pub(in crate::data) fn push<Id>(&mut self, ids: &[Id]) -> Result<(), Error>
    where
        Id: Copy + TryInto<i32> + std::fmt::Display,
    {
        let number = self.lengths.len();
        let refuse = |what: String| {
            Error::malformed(self.path, format!("document {number} {what}: cut it up"))
        };
        let length = i32::try_from(ids.len());
        let length = length.map_err(|_| {
            refuse(format!(
                "has {} tokens; a sequence has at most {}",
                ids.len(),
                i32::MAX
            ))
        })?;
        for (position, &id) in ids.iter().enumerate() {
            let encoded = id.try_into().ok().and_then(|id| self.element.encode(id));
            let encoded = encoded.ok_or_else(|| {
                Error::malformed(
                    self.path,
                    format!(
                        "token id {id} at position {position} of document {number} does not fit {:?}",
                        self.element
                    ),
                )
            })?;
            let written = self.out.write_all(&encoded);
            written.map_err(Error::io(self.path, "write"))?;
        }
        self.lengths.push(length);
        Ok(())
    }
}

/// Ending of the file of checksums beside a dataset, as the program `b3sum` reads it.
pub(super) const SUMS: &str = "blake3";

/// Writes the documents that `fill` adds; both files are there in the end, or neither is new, as where `fill` breaks off.
pub(in crate::data) fn write_documents(
    prefix: &Path,
    element: Element,
    fill: impl FnOnce(&mut Documents<'_>) -> Result<ControlFlow<()>, Error>,
) -> Result<ControlFlow<()>, Error> {
    let bin_path = with_ending(prefix, "bin");
    let mut lengths = Vec::new();
    let mut broken_off = None;
    let mut sums = Vec::new();
    let mut sum = |path: &Path, hash: String| {
        // The file of sums is text.
        let name = path.file_name().and_then(OsStr::to_str);
        sums.extend(name.map(|name| (name.to_owned(), hash)));
    };
    // Those of files that these replace: without sums nothing is checked, by others all would seem damaged.
    drop(std::fs::remove_file(with_ending(prefix, SUMS)));
    let written = write_atomically(&bin_path, |out| {
        let mut hashed = Hashed::new(out);
        lengths = {
            let mut documents = Documents {
                path: &bin_path,
                out: BufWriter::with_capacity(1 << 20, &mut hashed),
                element,
                lengths: Vec::new(),
            };
            let filled = fill(&mut documents);
            if !matches!(filled, Ok(ControlFlow::Continue(()))) {
                broken_off = Some(filled);
                return Err(io::Error::other("not all documents are there"));
            }
            documents.out.flush()?;
            documents.lengths
        };
        sum(&bin_path, hashed.hex());
        Ok(())
    });
    if let Some(filled) = broken_off {
        return filled;
    }
    written?;
    let idx_path = with_ending(prefix, "idx");
    let indexed = write_atomically(&idx_path, |out| {
        let mut hashed = Hashed::new(out);
        let mut out = BufWriter::with_capacity(1 << 20, &mut hashed);
        out.write_all(&MAGIC)?;
        out.write_all(&VERSION.to_le_bytes())?;
        out.write_all(&[element.code()])?;
        out.write_all(&(lengths.len() as u64).to_le_bytes())?;
        out.write_all(&(lengths.len() as u64 + 1).to_le_bytes())?;
        for length in &lengths {
            out.write_all(&length.to_le_bytes())?;
        }
        let mut offset = 0_i64;
        for &length in &lengths {
            out.write_all(&offset.to_le_bytes())?;
            offset += i64::from(length) * element.bytes() as i64;
        }
        for boundary in 0..=lengths.len() as i64 {
            out.write_all(&boundary.to_le_bytes())?;
        }
        out.flush()?;
        drop(out);
        sum(&idx_path, hashed.hex());
        Ok(())
    });
    if indexed.is_err() {
        // Without its index it is of no use, and in the way of the next try.
        let _ = std::fs::remove_file(&bin_path);
    }
    indexed?;
    sums::write(&with_ending(prefix, SUMS), &sums)?;
    Ok(ControlFlow::Continue(()))
}

/// Writes a dataset of one sequence a document.
pub fn write(prefix: &Path, element: Element, documents: &[&[i32]]) -> Result<(), Error> {
    let written = write_documents(prefix, element, |all| {
        let mut each = documents.iter();
        each.try_for_each(|ids| all.push(ids))?;
        Ok(ControlFlow::Continue(()))
    });
    written.map(drop)
}
