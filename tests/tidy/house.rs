//! What may know what, and what is left: the tables that the rules hold the workspace to.

use crate::circles::Left;
use crate::laws::{Crate, Excused, Floor, LeftUntil};

/// What a crate may depend on.
pub(crate) const CRATES: &[Crate] = &[
    Crate {
        name: "profiles",
        knows: &[],
        tests_know: &[],
    },
    Crate {
        name: "kernels",
        knows: &["profiles"],
        tests_know: &["emulator"],
    },
    Crate {
        name: "emulator",
        knows: &["profiles", "kernels"],
        tests_know: &[],
    },
    Crate {
        name: "planner",
        knows: &["profiles"],
        tests_know: &[],
    },
    Crate {
        name: "executor",
        knows: &["profiles", "kernels", "planner"],
        tests_know: &["emulator"],
    },
    Crate {
        name: "reports",
        knows: &["profiles", "planner"],
        tests_know: &[],
    },
    Crate {
        name: "gpu-check",
        knows: &["profiles", "kernels", "planner", "executor", "reports"],
        tests_know: &[],
    },
    Crate {
        name: "moefold",
        knows: &[
            "profiles",
            "kernels",
            "planner",
            "executor",
            "reports",
            "gpu-check",
        ],
        tests_know: &[],
    },
];

/// The planner's data: what the executor and the reports may read.
pub(crate) const PLANNER_DATA: &[&str] = &[
    "model", "choice", "layout", "mesh", "schedule", "saved", "local", "plan", "answer",
];

/// What each module of the planner may import of it, from the ground up.
pub(crate) const PLANNER: &[Floor] = &[
    ("model", &[]),
    ("choice", &["model"]),
    ("layout", &["model", "choice"]),
    ("mesh", &["layout"]),
    ("schedule", &["choice", "layout"]),
    ("saved", &[]),
    ("local", &["model", "layout"]),
    ("options", &["model", "choice", "layout"]),
    ("shard", &["model", "local"]),
    ("memory", &["schedule", "shard"]),
    (
        "stack",
        &["model", "choice", "saved", "local", "shard", "memory"],
    ),
    ("rules", &["model", "choice", "layout", "options", "stack"]),
    ("plan", &["model", "choice", "layout", "options", "rules"]),
    ("answer", &["model", "choice", "plan"]),
    (
        "lower",
        &["model", "choice", "layout", "mesh", "local", "shard"],
    ),
    ("price", &["choice", "stack", "lower"]),
    ("partition", &[]),
    ("simulate", &["schedule"]),
    (
        "search",
        &[
            "model",
            "choice",
            "layout",
            "mesh",
            "schedule",
            "saved",
            "local",
            "options",
            "shard",
            "memory",
            "stack",
            "rules",
            "plan",
            "answer",
            "lower",
            "price",
            "partition",
            "simulate",
        ],
    ),
];

/// Data of the planner that imports algorithms.
pub(crate) const DATA_EXCUSED: &[Excused] = &[
    Excused {
        from: "plan",
        to: "rules",
        why: "a file is judged by the rules that a search goes by",
    },
    Excused {
        from: "plan",
        to: "options",
        why: "a file's pipeline is read as that of the flag is",
    },
];

/// What the executor and the reports read of the planner besides its data.
pub(crate) const READERS_EXCUSED: &[Excused] = &[Excused {
    from: "executor",
    to: "stack",
    why: "a rank reserves memory by replaying what the stack declares",
}];

/// Imports of the planner that are left until a module is there that opens them.
pub(crate) const PLANNER_LEFT: &[LeftUntil] = &[
    LeftUntil {
        from: "layout",
        to: "options",
        until: "rules",
    },
    LeftUntil {
        from: "layout",
        to: "plan",
        until: "choice",
    },
    LeftUntil {
        from: "layout",
        to: "stack",
        until: "rules",
    },
    LeftUntil {
        from: "lower",
        to: "plan",
        until: "choice",
    },
    LeftUntil {
        from: "lower",
        to: "saved",
        until: "local",
    },
    LeftUntil {
        from: "memory",
        to: "plan",
        until: "choice",
    },
    LeftUntil {
        from: "memory",
        to: "stack",
        until: "choice",
    },
    LeftUntil {
        from: "options",
        to: "plan",
        until: "choice",
    },
    LeftUntil {
        from: "price",
        to: "plan",
        until: "choice",
    },
    LeftUntil {
        from: "saved",
        to: "layout",
        until: "local",
    },
    LeftUntil {
        from: "saved",
        to: "model",
        until: "local",
    },
    LeftUntil {
        from: "saved",
        to: "plan",
        until: "choice",
    },
    LeftUntil {
        from: "saved",
        to: "stack",
        until: "local",
    },
    LeftUntil {
        from: "schedule",
        to: "plan",
        until: "choice",
    },
    LeftUntil {
        from: "shard",
        to: "saved",
        until: "local",
    },
    LeftUntil {
        from: "stack",
        to: "options",
        until: "choice",
    },
    LeftUntil {
        from: "stack",
        to: "plan",
        until: "choice",
    },
];

/// The circles of imports that are left. They only shrink.
pub(crate) const CIRCLES: &[Left] = &[
    Left {
        member: "moefold",
        module: "gpu_check::trials",
        size: 4,
        why: "the trials share what a trial is with the list of them",
    },
    Left {
        member: "moefold",
        module: "gpu_check",
        size: 3,
        why: "parts and report read the target and the summary of the command",
    },
    Left {
        member: "planner",
        module: "layout",
        size: 23,
        why: "rules and options of layouts, plans, stacks and what they save know each other",
    },
    Left {
        member: "planner",
        module: "lower",
        size: 4,
        why: "a layer's ops are listed by its parts with what the list is made of",
    },
    Left {
        member: "planner",
        module: "model::hf",
        size: 3,
        why: "presets are configurations, and a configuration may name a preset",
    },
    Left {
        member: "planner",
        module: "plan::check",
        size: 2,
        why: "a file is checked where it is read",
    },
    Left {
        member: "kernels",
        module: "cuda",
        size: 71,
        why: "the list of programs imports every op, and every op imports CUDA",
    },
    Left {
        member: "kernels",
        module: "check::cases",
        size: 7,
        why: "cases of every kind share the making of operands with the list of them",
    },
    Left {
        member: "executor",
        module: "profile",
        size: 3,
        why: "what is measured shares the options with its parts",
    },
];
