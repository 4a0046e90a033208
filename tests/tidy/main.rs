//! The rules of the house, as tests: which crate and which module may know which, where unsafe code
//! may live, that the executor never touches a device's memory, that every module says what it is.
//!
//! A rule is a function from a [`Tree`] to its offences. Here they are held to the workspace; in
//! [`planted`] each is shown a tree that breaks it.

mod circles;
mod house;
mod laws;
mod modules;
mod planted;
mod tree;

use std::path::Path;
use std::sync::LazyLock;

use crate::circles::Graph;
use crate::house::{CIRCLES, CRATES, DATA_EXCUSED, PLANNER, PLANNER_DATA, READERS_EXCUSED};
use crate::modules::Modules;
use crate::tree::Tree;

static TREE: LazyLock<Tree> = LazyLock::new(|| Tree::load(Path::new(env!("CARGO_MANIFEST_DIR"))));

/// Imports between the modules of a member.
fn imports(member: &str) -> Graph {
    let members = TREE.members();
    let member = members.iter().find(|found| found.name == member);
    Modules::of(&TREE, member.expect("a member")).imports()
}

/// Fails with every offence.
fn refuse(rule: &str, offences: &[String]) {
    assert!(offences.is_empty(), "{rule}\n{}", offences.join("\n"));
}

#[test]
fn law_crates_know_only_those_below_them() {
    let offences = laws::crate_edges(&TREE, CRATES);
    refuse("a crate depends on one it must not know:", &offences);
}

#[test]
fn law_the_executor_and_reports_read_only_the_data_half_of_the_planner() {
    let of = |member| {
        laws::foreign_modules(
            &TREE,
            member,
            "moefold_planner",
            PLANNER_DATA,
            READERS_EXCUSED,
        )
    };
    let offences = [of("executor"), of("reports")].concat();
    refuse(
        "only the command line may call the planner's algorithms:",
        &offences,
    );
}

#[test]
fn law_modules_of_the_planner_import_only_those_below_them() {
    let offences = laws::floors_in_order(PLANNER, PLANNER_DATA, DATA_EXCUSED);
    refuse("the table of modules is out of order:", &offences);
    let offences = laws::module_edges(&imports("planner"), PLANNER);
    refuse(
        "a module of the planner imports one it must not know:",
        &offences,
    );
}

#[test]
#[expect(
    clippy::print_stdout,
    reason = "the sizes are there to be read, with --nocapture"
)]
fn law_circles_of_imports_only_shrink() {
    let (mut sizes, mut offences) = (Vec::new(), Vec::new());
    for member in TREE.members() {
        let graph = imports(&member.name);
        sizes.push(circles::sizes(&member.name, &graph));
        offences.extend(circles::offences(&member.name, &graph, CIRCLES));
    }
    let sizes = sizes.join("; ");
    println!("{sizes}");
    refuse(
        &format!("circles of imports other than are left ({sizes}):"),
        &offences,
    );
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
    let offences = laws::lines_with(&TREE, "executor", &BANNED);
    refuse("device code in the executor:", &offences);
}

#[test]
fn law_only_kernels_depends_on_device_libraries() {
    let offences = laws::libraries_at_home(&TREE, &["gemm", "cudarc"], "kernels");
    refuse("device work is in kernels:", &offences);
}

#[test]
fn law_cudarc_gives_declarations_only() {
    let rule = "functions of CUDA are called as `cuda::libraries` finds them:";
    refuse(rule, &laws::calls_of_cudarc(&TREE));
}

#[test]
fn law_unsafe_code_lives_in_kernels() {
    let offences = laws::unsafe_outside(&TREE, &["kernels", "emulator"]);
    refuse("unsafe code outside its home:", &offences);
}

#[test]
fn law_every_module_says_what_it_is() {
    refuse("modules without a module doc:", &laws::without_doc(&TREE));
}

#[test]
fn law_nothing_is_left_half_done() {
    let rule = "unfinished work, or a bare allow where an expect with a reason belongs:";
    refuse(rule, &laws::half_done(&TREE));
}

#[test]
fn law_every_dependency_has_its_line_in_the_architecture() {
    let offences = laws::unexplained_dependencies(&TREE);
    refuse("ARCHITECTURE.md gives every dependency a line:", &offences);
}
