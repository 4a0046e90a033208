//! A pack: compiled programs for machines without NVRTC, as one file or a directory.
//!
//! A file is made by `moefold kernels --out FILE` on any machine with NVRTC, a GPU or not. It holds
//! the version of that NVRTC and the entries of [`crate::cuda::cache`] one after the other. A
//! directory is a cache copied from elsewhere. A pack is only read.

use std::collections::HashMap;
use std::fs;
use std::io;
use std::ops::Range;
use std::path::Path;

use crate::cuda::cache::{Directory, HASH, Key, decode, encode, write};
use crate::cuda::libraries::Version;
use crate::cuda::nvrtc::Cubin;
use crate::cuda::program::{Architecture, Program};

/// First bytes of a pack; the number is the version of the format.
const MAGIC: &[u8] = b"moefold kernels 1\n";

/// Compiled programs to read.
pub(crate) enum Pack {
    File {
        nvrtc: Version,
        bytes: Vec<u8>,
        entries: HashMap<Key, Range<usize>>,
    },
    Directory(Directory),
}

impl Pack {
    /// Opens a pack.
    pub(crate) fn open(path: &Path) -> io::Result<Self> {
        if path.is_dir() {
            return Ok(Self::Directory(Directory(path.to_owned())));
        }
        let bytes = fs::read(path)?;
        let damaged = || {
            io::Error::new(
                io::ErrorKind::InvalidData,
                "not a pack of kernels of this version, or cut short; \
                 `moefold kernels --out FILE` writes one",
            )
        };
        let (nvrtc, entries) = index(&bytes).ok_or_else(damaged)?;
        Ok(Self::File {
            nvrtc,
            bytes,
            entries,
        })
    }

    /// The machine code of a program, if it is here and whole.
    pub(crate) fn get(&self, program: &Program, architecture: Architecture) -> Option<Cubin> {
        match self {
            Self::Directory(directory) => directory.get_any(program, architecture),
            Self::File {
                nvrtc,
                bytes,
                entries,
            } => {
                let key = Key::new(program, architecture, *nvrtc);
                decode(key, &bytes[entries.get(&key)?.clone()])
            }
        }
    }
}

/// How many entries of a pack that is a file are whole.
pub(crate) fn whole(path: &Path) -> io::Result<usize> {
    match Pack::open(path)? {
        Pack::Directory(_) => Err(io::ErrorKind::IsADirectory.into()),
        Pack::File { bytes, entries, .. } => {
            let is_whole =
                |(key, at): &(&Key, &Range<usize>)| decode(**key, &bytes[(*at).clone()]).is_some();
            Ok(entries.iter().filter(is_whole).count())
        }
    }
}

/// Where the entries of a file are.
fn index(bytes: &[u8]) -> Option<(Version, HashMap<Key, Range<usize>>)> {
    let rest = bytes.strip_prefix(MAGIC)?;
    let (major, rest) = rest.split_first_chunk::<4>()?;
    let (minor, mut rest) = rest.split_first_chunk::<4>()?;
    let version = Version::new(u32::from_le_bytes(*major), u32::from_le_bytes(*minor), 0);
    let mut entries = HashMap::new();
    while !rest.is_empty() {
        let (key, after) = rest.split_first_chunk::<HASH>()?;
        let (length, after) = after.split_first_chunk::<8>()?;
        let length = usize::try_from(u64::from_le_bytes(*length)).ok()?;
        let start = bytes.len() - after.len();
        rest = after.get(length..)?;
        entries.insert(Key(*key), start..start + length);
    }
    Some((version, entries))
}

/// Writes a pack file.
pub(crate) fn write_pack<'a>(
    path: &Path,
    nvrtc: Version,
    cubins: impl Iterator<Item = (&'a Program, Architecture, &'a Cubin)>,
) -> io::Result<()> {
    let mut bytes = MAGIC.to_vec();
    bytes.extend_from_slice(&nvrtc.major.to_le_bytes());
    bytes.extend_from_slice(&nvrtc.minor.to_le_bytes());
    for (program, architecture, cubin) in cubins {
        let key = Key::new(program, architecture, nvrtc);
        let entry = encode(key, cubin);
        bytes.extend_from_slice(&key.0);
        bytes.extend_from_slice(&(entry.len() as u64).to_le_bytes());
        bytes.extend_from_slice(&entry);
    }
    write(path, &bytes)
}
