//! The readers, each with the inputs that it begins with.
//!
//! A reader is called as the program calls it, and what it accepted is asked what the program would ask first: a model
//! for its parameters, a profile for a price, a dataset for its tokens. It says why it refuses what it does not accept.

mod execution;
mod planning;
mod search;

use crate::target::Target;

/// All readers.
pub(crate) fn all() -> impl Iterator<Item = Target> {
    planning::TARGETS
        .into_iter()
        .chain([search::TARGET])
        .chain(execution::TARGETS)
}

/// Readers with a defect each, which a hunt has to find.
pub(crate) fn planted() -> impl Iterator<Item = Target> {
    [
        Target::new("planted-panic", "panics at a word", |_, input| {
            assert!(!has(input, b"-1"), "a planted defect");
            Ok(())
        })
        .also(PLANTED),
        Target::new("planted-hang", "computes for ever at a word", |_, input| {
            while has(input, b"-1") {
                std::hint::spin_loop();
            }
            Ok(())
        })
        .also(PLANTED),
        Target::new(
            "planted-memory",
            "takes all memory at a word",
            |_, input| {
                let mut kept = Vec::new();
                while has(input, b"-1") {
                    kept.push(vec![1_u8; 1 << 24]);
                }
                drop(kept);
                Ok(())
            },
        )
        .also(PLANTED),
        Target::new("planted-stack", "recurs for ever at a word", |_, input| {
            fn deeper(depth: u64) -> u64 {
                if std::hint::black_box(depth) == u64::MAX {
                    return 0;
                }
                std::hint::black_box(deeper(depth + 1) + depth)
            }
            if has(input, b"-1") {
                deeper(0);
            }
            Ok(())
        })
        .also(PLANTED),
    ]
    .into_iter()
}

const PLANTED: &[&str] = &["tests/hostile/corpus/routing/one.json"];

fn has(input: &[u8], word: &[u8]) -> bool {
    input.windows(word.len()).any(|window| window == word)
}
