//! Compiled programs kept on disk: the entry format, and directories of entries.
//!
//! An entry is named by the hash of everything that the machine code depends on: source with its defines,
//! prelude, options (the architecture among them) and version of NVRTC. A directory holds entries by version,
//! `nvrtc-13.0/KEY.cubin`, so that a machine without NVRTC can use what another version made. Entries
//! are written under a temporary name and renamed, and carry a checksum: one that does not hold is as
//! good as absent, and replaced when its program is compiled again.

use std::fs;
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};

use crate::cuda::libraries::Version;
use crate::cuda::nvrtc::{Cubin, options, source};
use crate::cuda::prelude;
use crate::cuda::program::{Architecture, Program};

pub(crate) mod pack;

/// First bytes of an entry; the number is the version of the format.
const MAGIC: &[u8] = b"moefold cubin 1\n";

const HASH: usize = 32;

/// The name of an entry.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Key([u8; HASH]);

impl Key {
    /// The name of this program's machine code for this architecture by this NVRTC.
    pub(crate) fn new(program: &Program, architecture: Architecture, nvrtc: Version) -> Self {
        let mut hasher = blake3::Hasher::new();
        // Each part with its length before it, so that no two lists of parts read the same.
        let mut part = |bytes: &[u8]| {
            hasher.update(&(bytes.len() as u64).to_le_bytes());
            hasher.update(bytes);
        };
        part(MAGIC);
        part(nvrtc.to_string().as_bytes());
        part(source(program, architecture).as_bytes());
        for (name, text) in prelude::HEADERS {
            part(name.as_bytes());
            part(text.as_bytes());
        }
        for option in options(architecture) {
            part(option.as_bytes());
        }
        Self(*hasher.finalize().as_bytes())
    }

    fn file(self) -> String {
        format!("{}.cubin", blake3::Hash::from_bytes(self.0).to_hex())
    }
}

/// An entry as it is stored: magic, checksum of the rest, key, length of the log, log, image.
fn encode(key: Key, cubin: &Cubin) -> Vec<u8> {
    let mut body = Vec::with_capacity(HASH + 8 + cubin.log.len() + cubin.image.len());
    body.extend_from_slice(&key.0);
    body.extend_from_slice(&(cubin.log.len() as u64).to_le_bytes());
    body.extend_from_slice(cubin.log.as_bytes());
    body.extend_from_slice(&cubin.image);
    let mut entry = MAGIC.to_vec();
    entry.extend_from_slice(blake3::hash(&body).as_bytes());
    entry.extend_from_slice(&body);
    entry
}

/// The entry of this key, if that is what the bytes are, whole and unchanged.
fn decode(key: Key, entry: &[u8]) -> Option<Cubin> {
    let (checksum, body) = entry.strip_prefix(MAGIC)?.split_at_checked(HASH)?;
    if blake3::hash(body).as_bytes() != checksum {
        return None;
    }
    let (found, body) = body.split_at_checked(HASH)?;
    if found != key.0 {
        return None;
    }
    let (length, body) = body.split_first_chunk::<8>()?;
    let length = usize::try_from(u64::from_le_bytes(*length)).ok()?;
    let (log, image) = body.split_at_checked(length)?;
    Some(Cubin {
        image: image.to_vec(),
        log: String::from_utf8(log.to_vec()).ok()?,
    })
}

/// A directory of entries.
#[derive(Debug, Clone)]
pub(crate) struct Directory(pub(crate) PathBuf);

impl Directory {
    /// The cache: `MOEFOLD_CACHE`, else `moefold/cubin` in the user's cache directory; none where
    /// the variable is set to nothing or there is no home.
    pub(crate) fn cache() -> Option<Self> {
        let path = |name| std::env::var_os(name).map(PathBuf::from);
        let own = path("MOEFOLD_CACHE");
        let users = || {
            path("XDG_CACHE_HOME")
                .filter(|path| path.is_absolute())
                .or_else(|| path("HOME").map(|home| home.join(".cache")))
                .map(|cache| cache.join("moefold/cubin"))
        };
        own.or_else(users)
            .filter(|path| !path.as_os_str().is_empty())
            .map(Self)
    }

    fn of(&self, version: Version) -> PathBuf {
        self.0.join(format!("nvrtc-{version}"))
    }

    /// The machine code of a program made by this NVRTC, if it is here and whole.
    pub(crate) fn get(
        &self,
        program: &Program,
        architecture: Architecture,
        nvrtc: Version,
    ) -> Option<Cubin> {
        let key = Key::new(program, architecture, nvrtc);
        let path = self.of(nvrtc).join(key.file());
        decode(key, &fs::read(&path).ok()?)
    }

    /// The machine code of a program made by any NVRTC, the newest first.
    pub(crate) fn get_any(&self, program: &Program, architecture: Architecture) -> Option<Cubin> {
        self.versions()
            .into_iter()
            .find_map(|version| self.get(program, architecture, version))
    }

    /// Stores an entry.
    pub(crate) fn put(
        &self,
        program: &Program,
        architecture: Architecture,
        nvrtc: Version,
        cubin: &Cubin,
    ) -> io::Result<()> {
        let key = Key::new(program, architecture, nvrtc);
        let directory = self.of(nvrtc);
        fs::create_dir_all(&directory)?;
        write(&directory.join(key.file()), &encode(key, cubin))
    }

    /// Versions that there are entries of, the newest first.
    fn versions(&self) -> Vec<Version> {
        let names = fs::read_dir(&self.0).into_iter().flatten().flatten();
        let mut versions = names
            .filter_map(|entry| {
                let name = entry.file_name().into_string().ok()?;
                let (major, minor) = name.strip_prefix("nvrtc-")?.split_once('.')?;
                Some(Version::new(major.parse().ok()?, minor.parse().ok()?, 0))
            })
            .collect::<Vec<_>>();
        versions.sort_unstable_by(|a, b| b.cmp(a));
        versions
    }
}

/// Writes a file under a name of this process and thread, then gives it its own.
fn write(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let unique = format!("{:?}", std::thread::current().id());
    let number: String = unique.chars().filter(char::is_ascii_digit).collect();
    let temporary = path.with_extension(format!("{}-{number}.tmp", std::process::id()));
    let written = fs::File::create(&temporary).and_then(|mut file| {
        file.write_all(bytes)?;
        file.sync_all()
    });
    let renamed = written.and_then(|()| fs::rename(&temporary, path));
    if renamed.is_err() {
        let _ = fs::remove_file(&temporary);
    }
    renamed
}

#[cfg(test)]
mod tests;
