//! Tests of the cases: a wrong result is found, and every op has one.

use super::*;

#[test]
fn a_wrong_output_does_not_pass() {
    let device = Device::cpu(1);
    let written = |values: &[f32]| {
        let tensor = device.from_f32(TensorClass::Activations, values, &[values.len()]);
        Written::new("y", &tensor)
    };
    let integers = |values: &[i32]| {
        let tensor = device.from_i32(TensorClass::Activations, values, &[values.len()]);
        Written::new("ids", &tensor)
    };
    let passes = |got: &Written, want: &Written| verdict(got, want, Dtype::F32).passes();
    let want = written(&[1.0, 2.0, 3.0]);
    assert!(passes(&written(&[1.0, 2.0, 3.0]), &want));
    assert!(!passes(&written(&[1.0, 2.0, 3.001]), &want));
    assert!(!passes(&written(&[1.0, f32::NAN, 3.0]), &want));
    assert!(!passes(&integers(&[1, 2, 4]), &integers(&[1, 2, 3])));
}

#[test]
fn one_wrong_row_of_many_does_not_pass() {
    let rows = 100_000;
    let want: Vec<f64> = vec![1.0; 8 * rows];
    let mut got = want.clone();
    got[80..88].fill(0.0);
    let (error, worst_row) = distance(&got, &want, 8);
    assert!(error <= 1e-2, "{error}: the norm of all hardly moves");
    assert!((worst_row - 1.0).abs() < 1e-9, "{worst_row}");
    got[80] = f64::NAN;
    assert!(distance(&got, &want, 8).1.is_nan());
}

/// Functions that are no ops: keys of cost tables, and tables that the host makes.
const NO_OPS: [&str; 3] = ["key", "unpermute_key", "table"];

/// Files of shared calls of which every function is taken by a case.
const SHARED: [&str; 4] = ["attention.rs", "grouped.rs", "rows.rs", "routing.rs"];

/// An op that is not called by any case never meets its reference on a GPU.
#[test]
fn every_public_op_has_a_case() {
    let source = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let read = |path: &std::path::Path| {
        std::fs::read_to_string(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
    };
    let folder = source.join("check/cases");
    let files = std::fs::read_dir(&folder).expect("cases are in a folder");
    let own = files.map(|file| file.expect("a file").path());
    let shared = SHARED.map(|file| source.join("cases").join(file));
    let called: String = own.chain(shared).map(|path| read(&path)).collect();
    let library = read(&source.join("lib.rs"));
    let no_ops = [
        "ahead", "bf16", "cases", "check", "cuda", "device", "pace", "programs", "tensor",
    ];
    let modules = library
        .lines()
        .filter_map(|line| line.strip_prefix("pub mod ")?.strip_suffix(';'))
        .filter(|module| !no_ops.contains(module));
    let (mut ops, mut without) = (0, Vec::new());
    for module in modules {
        let text = read(&source.join(format!("{module}.rs")));
        let functions = text.lines().filter_map(|line| line.strip_prefix("pub fn "));
        for function in functions {
            let name = function.split(['(', '<']).next().unwrap_or_default();
            if NO_OPS.contains(&name) {
                continue;
            }
            ops += 1;
            if !called.contains(&format!("{module}::{name}(")) {
                without.push(format!("{module}::{name}"));
            }
        }
    }
    assert!(ops > 50, "{ops} ops were found");
    assert!(without.is_empty(), "no case calls {}", without.join(", "));
}

#[test]
fn names_of_cases_are_their_own_and_start_with_the_op() {
    for sizes in Sizes::small().into_iter().chain(Sizes::real()) {
        let mut names: Vec<String> = cases(&sizes, Dtype::Bf16)
            .into_iter()
            .map(|case| case.name)
            .collect();
        let all = names.len();
        assert!(names.iter().all(|name| name.contains("::")), "{names:?}");
        names.sort();
        names.dedup();
        assert_eq!(names.len(), all, "two cases of {} share a name", sizes.name);
    }
}

#[test]
fn loads_deal_every_row() {
    for sizes in Sizes::small().into_iter().chain(Sizes::real()) {
        for (name, counts) in loads(&sizes) {
            assert_eq!(counts.len(), sizes.experts, "{name}");
            assert_eq!(counts.iter().sum::<usize>(), sizes.tokens * sizes.topk);
            assert_eq!(counts.contains(&0), name == "skewed");
        }
    }
}

/// What a sanitizer is run on takes the kernels of tiles and bulk copies.
#[test]
fn some_small_sizes_have_rows_of_whole_pieces_and_some_have_not() {
    let wide = Sizes::small()
        .iter()
        .filter(|sizes| sizes.is_wide())
        .count();
    assert!(wide > 0 && wide < Sizes::small().len());
}
