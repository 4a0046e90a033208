//! Versions, names and the reading of memory maps. What needs a library is in `tests/libraries.rs`.

use super::open::file_mapped_at;
use super::*;

#[test]
fn versions_are_read_as_their_libraries_write_them() {
    let check = |version: Version, text: &str| assert_eq!(version.to_string(), text);
    check(Version::from_cuda(12040), "12.4");
    check(Version::from_cuda(13000), "13.0");
    check(Version::from_nccl(22809), "2.28.9");
    check(Version::from_nccl(2804), "2.8.4");
    assert!(Version::new(12, 10, 0) > Version::new(12, 9, 1));
}

#[test]
fn a_wheel_matches_the_driver() {
    let check = |library: Library, driver: Option<Version>, expected: &str| {
        assert_eq!(library.remedy(driver), expected);
    };
    let (old, new) = (Version::new(12, 4, 0), Version::new(13, 1, 0));
    check(
        Library::Nvrtc,
        None,
        "pip install 'nvidia-cuda-nvrtc==13.*'",
    );
    check(
        Library::Nvrtc,
        Some(new),
        "pip install 'nvidia-cuda-nvrtc==13.1.*'",
    );
    check(
        Library::Nvrtc,
        Some(old),
        "pip install 'nvidia-cuda-nvrtc-cu12==12.4.*'",
    );
    check(
        Library::CublasLt,
        Some(new),
        "pip install 'nvidia-cublas==13.*'",
    );
    check(Library::Nccl, Some(old), "pip install nvidia-nccl-cu12");
}

#[test]
fn a_driver_of_cuda_12_prefers_libraries_of_cuda_12() {
    let first = |driver| Library::Nvrtc.file_names(driver)[0].clone();
    assert_eq!(first(Some(Version::new(12, 8, 0))), "libnvrtc.so.12");
    assert_eq!(first(Some(Version::new(13, 0, 0))), "libnvrtc.so.13");
    assert_eq!(first(None), "libnvrtc.so.13");
}

#[test]
fn a_memory_map_names_the_file_of_an_address() {
    let line = "7f00-7fff r-xp 00001000 fe:01 1234      /opt/a folder/libcuda.so.1";
    let file = PathBuf::from("/opt/a folder/libcuda.so.1");
    assert_eq!(file_mapped_at(line, 0x7f00), Some(file));
    assert_eq!(file_mapped_at(line, 0x7fff), None);
    assert_eq!(
        file_mapped_at("7f00-7fff rw-p 00000000 00:00 0", 0x7f10),
        None
    );
}
