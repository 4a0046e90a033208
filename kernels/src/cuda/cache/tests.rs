//! Entries, directories and packs: what goes in comes out, and nothing else.

use std::fs;
use std::path::{Path, PathBuf};

use super::pack::{Pack, write_pack};
use super::{Directory, Key, decode, encode};
use crate::cuda::libraries::Version;
use crate::cuda::nvrtc::Cubin;
use crate::cuda::program::{Architecture, Define, Program, Source};

const NVRTC: Version = Version::new(13, 0, 0);

const SM90: Architecture = Architecture::SM90;

fn program(tile: usize) -> Program {
    let source = Source {
        stem: "sum",
        text: "KERNEL(32, 1) sum() {}",
    };
    source.with(&[Define::int("TILE", tile)])
}

fn cubin(byte: u8) -> Cubin {
    Cubin {
        image: vec![byte; 1000],
        log: "ptxas info : Used 16 registers".to_owned(),
    }
}

fn files(folder: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder).expect("a folder");
    entries
        .map(|entry| entry.expect("an entry").path())
        .collect()
}

#[test]
fn a_key_names_everything_that_code_depends_on() {
    let key = Key::new(&program(64), SM90, NVRTC);
    assert!(key == Key::new(&program(64), SM90, NVRTC));
    let other_text = Source {
        stem: "sum",
        text: "KERNEL(32, 1) sum() { }",
    };
    let other_stem = Source {
        stem: "add",
        ..program(64).source
    };
    let tile = [Define::int("TILE", 64)];
    for other in [
        Key::new(&program(128), SM90, NVRTC),
        Key::new(&program(64), Architecture::SM100, NVRTC),
        Key::new(&program(64), SM90, Version::new(13, 1, 0)),
        Key::new(&other_text.with(&tile), SM90, NVRTC),
        Key::new(&other_stem.with(&tile), SM90, NVRTC),
    ] {
        assert!(key != other);
    }
}

#[test]
fn law_an_entry_with_any_byte_changed_or_missing_is_no_entry() {
    let key = Key::new(&program(64), SM90, NVRTC);
    let entry = encode(key, &cubin(7));
    assert_eq!(decode(key, &entry), Some(cubin(7)));
    for at in 0..entry.len() {
        let mut changed = entry.clone();
        changed[at] ^= 0x20;
        assert_eq!(decode(key, &changed), None, "byte {at} changed");
        assert_eq!(decode(key, &entry[..at]), None, "cut at {at}");
    }
    let another = Key::new(&program(128), SM90, NVRTC);
    assert_eq!(
        decode(another, &entry),
        None,
        "an entry under another's name"
    );
}

#[test]
fn a_directory_gives_what_was_put_and_replaces_what_was_damaged() {
    let folder = tempfile::tempdir().expect("a folder");
    let directory = Directory(folder.path().join("not/there/yet"));
    let program = program(64);
    assert_eq!(directory.get(&program, SM90, NVRTC), None);
    assert_eq!(directory.get_any(&program, SM90), None);
    let put = |cubin: Cubin| directory.put(&program, SM90, NVRTC, &cubin);
    put(cubin(1)).expect("it is written");
    assert_eq!(directory.get(&program, SM90, NVRTC), Some(cubin(1)));

    let written = files(&directory.0.join("nvrtc-13.0"));
    let [file] = written.as_slice() else {
        panic!("one entry and no temporary file: {written:?}");
    };
    fs::write(file, b"half an entry").expect("damaging it");
    assert_eq!(directory.get(&program, SM90, NVRTC), None);
    put(cubin(2)).expect("it is written again");
    assert_eq!(directory.get(&program, SM90, NVRTC), Some(cubin(2)));
}

#[test]
fn without_a_compiler_the_newest_version_serves() {
    let folder = tempfile::tempdir().expect("a folder");
    let directory = Directory(folder.path().to_owned());
    for (minor, byte) in [(2, 2), (10, 10), (9, 9)] {
        let version = Version::new(13, minor, 0);
        directory
            .put(&program(64), SM90, version, &cubin(byte))
            .expect("it is written");
    }
    fs::create_dir(folder.path().join("nvrtc-x")).expect("something else");
    assert_eq!(directory.get_any(&program(64), SM90), Some(cubin(10)));
    assert_eq!(directory.get_any(&program(64), Architecture::SM100), None);
}

#[test]
fn a_pack_gives_what_was_written_and_says_what_is_no_pack() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("kernels.pack");
    let (one, two) = (program(64), program(128));
    let (first, second) = (cubin(1), cubin(2));
    let entries = [(&one, SM90, &first), (&two, SM90, &second)];
    write_pack(&path, NVRTC, entries.into_iter()).expect("it is written");
    let pack = Pack::open(&path).expect("a pack");
    assert_eq!(pack.get(&one, SM90), Some(cubin(1)));
    assert_eq!(pack.get(&two, SM90), Some(cubin(2)));
    assert_eq!(pack.get(&one, Architecture::SM100), None);

    let whole = fs::read(&path).expect("it is there");
    for cut in [0, 5, whole.len() - 1] {
        fs::write(&path, &whole[..cut]).expect("cutting it");
        let error = Pack::open(&path).err().expect("no pack");
        assert!(error.to_string().contains("not a pack of kernels"));
    }
    let mut changed = whole.clone();
    *changed.last_mut().expect("bytes") ^= 1;
    fs::write(&path, &changed).expect("changing it");
    let pack = Pack::open(&path).expect("the rest of it is a pack");
    assert_eq!(pack.get(&one, SM90), Some(cubin(1)));
    assert_eq!(pack.get(&two, SM90), None);
    assert!(Pack::open(&folder.path().join("missing")).is_err());
}

#[test]
fn a_cache_directory_is_a_pack() {
    let folder = tempfile::tempdir().expect("a folder");
    let directory = Directory(folder.path().to_owned());
    directory
        .put(&program(64), SM90, NVRTC, &cubin(5))
        .expect("it is written");
    let pack = Pack::open(folder.path()).expect("a pack");
    assert_eq!(pack.get(&program(64), SM90), Some(cubin(5)));
}
