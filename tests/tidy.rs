//! The rules of the house, as tests: which crate may know which, where unsafe code may live, that the
//! executor never touches a device's memory, that every module says what it is.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

const MEMBERS: [&str; 5] = ["profiles", "kernels", "planner", "executor", "reports"];

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// Every Rust file below a folder, with its text.
fn sources(folder: &Path) -> Vec<(PathBuf, String)> {
    let mut found = Vec::new();
    let mut folders = vec![folder.to_owned()];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(&folder).expect("the folder is readable") {
            let path = entry.expect("the entry is readable").path();
            if path.is_dir() {
                folders.push(path);
            } else if path.extension().is_some_and(|extension| extension == "rs") {
                let text = fs::read_to_string(&path).expect("source is UTF-8");
                found.push((path, text));
            }
        }
    }
    found.sort();
    found
}

fn all_sources() -> Vec<(PathBuf, String)> {
    let mut all = sources(&root().join("src"));
    for member in MEMBERS {
        all.extend(sources(&root().join(member).join("src")));
    }
    all
}

/// Fails with every offending line, so that one run shows all there is to mend.
fn refuse(rule: &str, offences: &[String]) {
    assert!(offences.is_empty(), "{rule}\n{}", offences.join("\n"));
}

#[test]
fn law_crates_know_only_those_below_them() {
    let allowed = BTreeMap::from([
        ("profiles", BTreeSet::new()),
        ("kernels", BTreeSet::from(["profiles"])),
        ("planner", BTreeSet::from(["profiles"])),
        (
            "executor",
            BTreeSet::from(["profiles", "kernels", "planner"]),
        ),
        ("reports", BTreeSet::from(["profiles", "planner"])),
    ]);
    let mut offences = Vec::new();
    for (member, allowed) in &allowed {
        let path = root().join(member).join("Cargo.toml");
        let manifest: toml::Table = fs::read_to_string(&path)
            .expect("a manifest")
            .parse()
            .expect("valid TOML");
        for table in ["dependencies", "dev-dependencies", "build-dependencies"] {
            let Some(dependencies) = manifest.get(table).and_then(toml::Value::as_table) else {
                continue;
            };
            for name in dependencies
                .keys()
                .filter_map(|name| name.strip_prefix("moefold-"))
            {
                if !allowed.contains(name) {
                    offences.push(format!("{member}/Cargo.toml: {table} has moefold-{name}"));
                }
            }
        }
    }
    refuse("a crate depends on one it must not know:", &offences);
}

#[test]
fn law_the_executor_and_reports_read_only_the_data_half_of_the_planner() {
    const ALGORITHM: [&str; 6] = [
        "search",
        "price",
        "lower",
        "memory",
        "simulate",
        "partition",
    ];
    let mut offences = Vec::new();
    for member in ["executor", "reports"] {
        for (path, text) in sources(&root().join(member).join("src")) {
            let shipped = text.split("#[cfg(test)]").next().unwrap_or_default();
            for module in ALGORITHM {
                if shipped.contains(&format!("moefold_planner::{module}")) {
                    offences.push(format!(
                        "{}: uses moefold_planner::{module}",
                        path.display()
                    ));
                }
            }
        }
    }
    refuse("only the CLI may call the planner's algorithms:", &offences);
}

#[test]
fn law_only_rules_make_a_layout() {
    let mut offences = Vec::new();
    let home = root().join("planner/src/rules/degrees.rs");
    let mut made = 0;
    for (path, text) in all_sources() {
        let found = text.matches("Layout::proven(").count();
        if path == home {
            made += found;
        } else if found > 0 {
            offences.push(path.display().to_string());
        }
    }
    refuse("a layout that no rule was asked of:", &offences);
    assert_eq!(made, 1, "rules make layouts in one place");
}

#[test]
fn law_the_executor_never_touches_device_memory() {
    // What a device implementation is made of; the executor calls ops of `kernels` by name instead.
    const BANNED: [&str; 8] = [
        "unsafe ",
        "as_ptr",
        "as_mut_ptr",
        "rayon::",
        "cudarc",
        "kernels::cpu",
        "::cpu::",
        "from_raw_parts",
    ];
    let mut offences = Vec::new();
    for (path, text) in sources(&root().join("executor/src")) {
        for (number, line) in text.lines().enumerate() {
            if line.trim_start().starts_with("//") {
                continue;
            }
            for banned in BANNED {
                if line.contains(banned) {
                    offences.push(format!("{}:{}: {banned}", path.display(), number + 1));
                }
            }
        }
    }
    refuse("device code in the executor:", &offences);
}

#[test]
fn law_only_kernels_depends_on_device_libraries() {
    const DEVICE: [&str; 2] = ["gemm", "cudarc"];
    let mut offences = Vec::new();
    for member in MEMBERS.iter().filter(|member| **member != "kernels") {
        let manifest: toml::Table = fs::read_to_string(root().join(member).join("Cargo.toml"))
            .expect("a manifest")
            .parse()
            .expect("valid TOML");
        let dependencies = manifest["dependencies"].as_table().expect("a table");
        let found = DEVICE
            .iter()
            .filter(|name| dependencies.contains_key(**name));
        offences.extend(found.map(|name| format!("{member}/Cargo.toml: {name}")));
    }
    refuse("device work is in kernels:", &offences);
}

#[test]
fn law_cudarc_gives_declarations_only() {
    // Its functions panic where a library, or a function of one, is missing.
    const CALLS: [&str; 3] = ["::result", "::safe", "culib"];
    let mut offences = Vec::new();
    for (path, text) in sources(&root().join("kernels/src")) {
        for (number, line) in text.lines().enumerate() {
            if line.contains("cudarc::") && CALLS.iter().any(|call| line.contains(call)) {
                offences.push(format!(
                    "{}:{}: {}",
                    path.display(),
                    number + 1,
                    line.trim()
                ));
            }
        }
    }
    refuse(
        "functions of CUDA are called as `cuda::libraries` finds them:",
        &offences,
    );
}

#[test]
fn law_unsafe_code_lives_in_kernels() {
    let mut offences = Vec::new();
    for (path, text) in all_sources() {
        if !path.starts_with(root().join("kernels")) && text.contains("(unsafe_code") {
            offences.push(format!("{}: lifts the ban on unsafe code", path.display()));
        }
    }
    refuse("unsafe code outside its home:", &offences);
}

#[test]
fn law_every_module_says_what_it_is() {
    let offences: Vec<String> = all_sources()
        .into_iter()
        .filter(|(_, text)| !text.starts_with("//!"))
        .map(|(path, _)| path.display().to_string())
        .collect();
    refuse("modules without a module doc:", &offences);
}

#[test]
fn law_nothing_is_left_half_done() {
    let marks = [
        concat!("FIX", "ME"),
        concat!("TO", "DO"),
        "dbg!(",
        "#[allow(",
        "#![allow(",
    ];
    let mut offences = Vec::new();
    for (path, text) in all_sources() {
        for (number, line) in text.lines().enumerate() {
            if marks.iter().any(|mark| line.contains(mark)) {
                offences.push(format!(
                    "{}:{}: {}",
                    path.display(),
                    number + 1,
                    line.trim()
                ));
            }
        }
    }
    refuse(
        "unfinished work, or a bare allow where an expect with a reason belongs:",
        &offences,
    );
}

#[test]
fn law_every_dependency_has_its_line_in_the_architecture() {
    let architecture = fs::read_to_string(root().join("ARCHITECTURE.md")).expect("ARCHITECTURE.md");
    let manifest: toml::Table = fs::read_to_string(root().join("Cargo.toml"))
        .expect("a manifest")
        .parse()
        .expect("valid TOML");
    let dependencies = manifest["workspace"]["dependencies"]
        .as_table()
        .expect("a table");
    let offences: Vec<String> = dependencies
        .keys()
        .filter(|name| !name.starts_with("moefold-"))
        .filter(|name| !architecture.contains(&format!("`{name}`")))
        .map(|name| format!("`{name}` is not explained"))
        .collect();
    refuse("ARCHITECTURE.md gives every dependency a line:", &offences);
}
