//! Where machine code is looked for, in order, and what is said where it is nowhere.

use super::Compiler;
use crate::cuda::cache::Directory;
use crate::cuda::cache::pack::Pack;
use crate::cuda::error::DeviceError;
use crate::cuda::libraries::Version;
use crate::cuda::nvrtc::Cubin;
use crate::cuda::nvrtc::tests::nvrtc_or_skip;
use crate::cuda::program::{Architecture, Program, Source};

fn program(text: &'static str) -> Program {
    let source = Source {
        stem: "empty",
        text,
    };
    source.with(&[])
}

const EMPTY: &str = "#include \"prelude.cuh\"\nKERNEL(32, 1) nothing() {}\nEXPORT(nothing)\n";

fn missing() -> DeviceError {
    DeviceError::new("NVRTC", "not found in /usr/lib")
}

fn marked(mark: &str) -> Cubin {
    Cubin {
        image: mark.as_bytes().to_vec(),
        log: String::new(),
    }
}

#[test]
fn a_pack_comes_before_the_cache_and_both_do_without_nvrtc() {
    let (packed, cached) = (tempfile::tempdir(), tempfile::tempdir());
    let (packed, cached) = (packed.expect("a folder"), cached.expect("a folder"));
    let pack = Directory(packed.path().to_owned());
    let cache = Directory(cached.path().to_owned());
    let version = Version::new(13, 0, 0);
    let (both, one) = (program("both"), program("one"));
    let sm80 = Architecture::SM80;
    pack.put(&both, sm80, version, &marked("pack"))
        .expect("it is written");
    for program in [&both, &one] {
        cache
            .put(program, sm80, version, &marked("cache"))
            .expect("it is written");
    }
    let pack = Pack::open(packed.path()).expect("a pack");
    let compiler = Compiler::new(Some(pack), Some(cache), Err(missing()));
    // A GPU of the same generation runs the code of its first.
    let sm86 = Architecture { major: 8, minor: 6 };
    for architecture in [sm80, sm86] {
        let from = |program| compiler.cubin(program, architecture).expect("it is there");
        assert_eq!(from(&both), marked("pack"));
        assert_eq!(from(&one), marked("cache"));
    }
}

#[test]
fn where_it_is_nowhere_the_error_says_where_it_was_looked_for_and_what_would_help() {
    let folder = tempfile::tempdir().expect("a folder");
    let cache = Directory(folder.path().to_owned());
    let compiler = Compiler::new(None, Some(cache), Err(missing()));
    let error = compiler.cubin(&program(EMPTY), Architecture::SM90);
    let said = error.expect_err("it is nowhere").to_string();
    for part in [
        "empty.cu for sm_90a",
        "MOEFOLD_PACK names no pack",
        &folder.path().display().to_string(),
        "not found in /usr/lib",
        "moefold kernels --out FILE",
    ] {
        assert!(said.contains(part), "{part} is not in: {said}");
    }
}

#[test]
fn what_is_compiled_is_kept_and_what_is_damaged_is_compiled_again() {
    let Some(nvrtc) = nvrtc_or_skip() else { return };
    let folder = tempfile::tempdir().expect("a folder");
    let cache = Directory(folder.path().to_owned());
    let version = nvrtc.version();
    let program = program(EMPTY);
    let sm90 = Architecture::SM90;
    let compiler = Compiler::new(None, Some(cache.clone()), Ok(nvrtc));
    let compiled = compiler.cubin(&program, sm90).expect("it compiles");
    assert_eq!(cache.get(&program, sm90, version), Some(compiled.clone()));
    cache
        .put(&program, sm90, version, &marked("kept"))
        .expect("it is written");
    let again = compiler.cubin(&program, sm90).expect("it is kept");
    assert_eq!(again, marked("kept"), "the cache comes before the compiler");
    let entries = folder.path().join(format!("nvrtc-{version}"));
    for entry in std::fs::read_dir(entries).expect("entries") {
        std::fs::write(entry.expect("an entry").path(), "damaged").expect("damaging it");
    }
    let again = compiler.cubin(&program, sm90).expect("it compiles");
    assert_eq!(again.image, compiled.image);
    let kept = cache.get(&program, sm90, version).expect("it is kept");
    assert_eq!(kept.image, compiled.image);
}

#[test]
fn many_programs_compile_at_once_in_order() {
    let Some(nvrtc) = nvrtc_or_skip() else { return };
    let compiler = Compiler::new(None, None, Ok(nvrtc));
    let names = ["first", "second", "third", "fourth"];
    let jobs = names.map(|name| {
        let text = format!("#include \"prelude.cuh\"\nKERNEL(32, 1) {name}() {{}}\n");
        (program(text.leak()), Architecture::SM80)
    });
    let cubins = compiler.cubins(&jobs).expect("they compile");
    for (name, cubin) in names.iter().zip(&cubins) {
        assert!(cubin.log.contains(&format!("'{name}'")), "{}", cubin.log);
    }
}
