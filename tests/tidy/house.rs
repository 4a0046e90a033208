//! What may know what, and what is left: the tables that the rules hold the workspace to.

use crate::circles::Left;
use crate::laws::{Crate, Excused, Floor};

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
        name: "hostile",
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
    "model", "choice", "layout", "mesh", "schedule", "saved", "local", "shard", "bucket",
    "runtime", "walk", "plan", "answer",
];

/// What each module of the planner may import of it, from the ground up.
pub(crate) const PLANNER: &[Floor] = &[
    ("model", &[]),
    ("choice", &["model"]),
    ("layout", &["model", "choice"]),
    ("mesh", &["layout"]),
    ("schedule", &["choice", "layout"]),
    ("saved", &[]),
    ("local", &["model", "choice", "layout"]),
    ("shard", &["model", "local"]),
    ("tensors", &["model", "local", "shard"]),
    ("bucket", &["model", "choice"]),
    (
        "runtime",
        &["model", "choice", "layout", "mesh", "local", "shard"],
    ),
    ("options", &["model", "choice", "layout"]),
    (
        "memory",
        &["layout", "schedule", "shard", "tensors", "runtime"],
    ),
    (
        "lower",
        &[
            "model", "choice", "layout", "mesh", "local", "shard", "tensors", "bucket", "runtime",
        ],
    ),
    (
        "stack",
        &[
            "model", "choice", "layout", "saved", "local", "shard", "runtime", "memory", "lower",
        ],
    ),
    ("walk", &["mesh", "stack"]),
    ("rules", &["model", "choice", "layout", "options", "stack"]),
    ("plan", &["model", "choice", "layout", "options", "rules"]),
    ("answer", &["model", "choice", "layout", "plan"]),
    (
        "settings",
        &["model", "choice", "layout", "options", "plan"],
    ),
    ("interval", &["choice", "plan"]),
    ("goodput", &[]),
    ("experts", &[]),
    ("price", &["choice", "runtime", "stack", "lower"]),
    ("partition", &["layout"]),
    ("simulate", &["layout", "schedule"]),
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
            "tensors",
            "bucket",
            "runtime",
            "walk",
            "memory",
            "stack",
            "rules",
            "plan",
            "answer",
            "lower",
            "price",
            "partition",
            "simulate",
            "interval",
        ],
    ),
    (
        "published",
        &[
            "model", "choice", "layout", "options", "stack", "plan", "interval", "search",
        ],
    ),
    ("calibrate", &["plan", "interval", "search"]),
];

/// Data of the planner that imports algorithms.
pub(crate) const DATA_EXCUSED: &[Excused] = &[
    Excused {
        from: "plan",
        to: "rules",
        why: "a file is judged by the rules that a search goes by",
    },
    Excused {
        from: "walk",
        to: "stack",
        why: "a walk is timed by what the stack's host takes",
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
    why: "a dry run is timed by the host of its stack, and Megatron-Core is answered for there",
}];

/// The circles of imports that are left. They only shrink.
pub(crate) const CIRCLES: &[Left] = &[
    Left {
        member: "moefold",
        module: "flags",
        size: 2,
        why: "flags are read from the arguments whose words they are",
    },
    Left {
        member: "planner",
        module: "layout::partial",
        size: 2,
        why: "a rule that is broken names the nearest degrees, which are pins of degrees",
    },
    Left {
        member: "planner",
        module: "model::resolve",
        size: 2,
        why: "a name is looked up among the presets, which are read as any configuration",
    },
    Left {
        member: "planner",
        module: "plan::check",
        size: 2,
        why: "a file is checked where it is read",
    },
    Left {
        member: "planner",
        module: "lower",
        size: 4,
        why: "a layer's ops are listed by its parts with what the list is made of",
    },
    Left {
        member: "kernels",
        module: "cases",
        size: 8,
        why: "operands of every kind share their making with the list of them",
    },
    Left {
        member: "kernels",
        module: "check::cases",
        size: 7,
        why: "cases of every kind share the making of operands with the list of them",
    },
    Left {
        member: "kernels",
        module: "device",
        size: 7,
        why: "a tensor knows its device, whose memory is tensors' buffers, and whom it tells of them",
    },
    Left {
        member: "kernels",
        module: "gemm",
        size: 5,
        why: "a product is an op's own type, which its CUDA half takes apart",
    },
    Left {
        member: "kernels",
        module: "cuda::program",
        size: 2,
        why: "a machine takes programs, whose arguments are its addresses",
    },
    Left {
        member: "kernels",
        module: "cuda::model",
        size: 4,
        why: "cases of the hardware model share what a case is with the list of them",
    },
    Left {
        member: "kernels",
        module: "attention",
        size: 3,
        why: "the sizes of a call are an op's own type, which its CUDA halves read",
    },
    Left {
        member: "kernels",
        module: "cuda::cublaslt",
        size: 3,
        why: "the library's handle is made where its descriptors and groups use it",
    },
    Left {
        member: "emulator",
        module: "machine",
        size: 7,
        why: "instructions of a kernel act on the machine that runs them",
    },
    Left {
        member: "executor",
        module: "profile",
        size: 3,
        why: "what is measured shares the options with its parts",
    },
    Left {
        member: "gpu-check",
        module: "trials",
        size: 11,
        why: "parts, trials and the report share what a check is asked and what it found",
    },
];
