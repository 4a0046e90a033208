//! Which rank a process is that `--launch processes` has started.

use std::fs;

/// Whether it is this one.
pub(crate) fn is_rank(process: u32, rank: u32) -> bool {
    let variable = format!("RANK={rank}");
    let all = fs::read(format!("/proc/{process}/environ")).unwrap_or_default();
    all.split(|&byte| byte == 0)
        .any(|set| set == variable.as_bytes())
}
