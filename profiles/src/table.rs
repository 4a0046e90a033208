//! The measured tables that ship with the program: what others measured on these GPUs.
//!
//! Facts only, as their publishers print them, in CSV files under `data/measured/` that name their
//! sources; nothing is fitted or corrected here. [`crate::pricing`] turns them into prices.

mod csv;
mod rows;

use std::sync::LazyLock;

pub use rows::{
    AttentionRow, CeilingRow, CollectiveRow, DispatchRow, FusedMoeRow, GemmRow, GroupedRow,
    HeadsRow, InterNodeRow, Mask,
};

use csv::lines;

use crate::dtype::Dtype;

macro_rules! file {
    ($name:literal) => {
        lines($name, include_str!(concat!("../data/measured/", $name)))
    };
}

static GEMM: LazyLock<Vec<GemmRow>> = LazyLock::new(|| {
    let mut rows = Vec::new();
    for line in file!("gemm.csv") {
        for (m, tflops) in line.series("m") {
            rows.push(GemmRow {
                gpu: line.cell("gpu"),
                dtype: line.dtype("dtype"),
                shape: [m, line.number("n"), line.number("k")],
                tflops,
            });
        }
    }
    rows
});

static CEILINGS: LazyLock<Vec<CeilingRow>> = LazyLock::new(|| {
    let rows = file!("matmul_max.csv").map(|line| CeilingRow {
        gpu: line.cell("gpu"),
        dtype: line.dtype("dtype"),
        tflops: line.number("tflops"),
    });
    rows.collect()
});

static ATTENTION: LazyLock<Vec<AttentionRow>> = LazyLock::new(|| {
    let mut rows = Vec::new();
    for line in file!("attention.csv") {
        for (seq_len, tflops) in line.series("s") {
            rows.push(AttentionRow {
                gpu: line.cell("gpu"),
                pass: line.pass(),
                mask: match line.cell("mask") {
                    "causal" => Mask::Causal,
                    _ => Mask::Full,
                },
                head_dim: line.number("head_dim"),
                source: line.cell("source"),
                seq_len,
                tflops,
            });
        }
    }
    rows
});

static HEADS: LazyLock<Vec<HeadsRow>> = LazyLock::new(|| {
    let rows = file!("attention_heads.csv").map(|line| HeadsRow {
        gpu: line.cell("gpu"),
        pass: line.pass().expect("this table separates the passes"),
        seq_len: line.number("seq_len"),
        heads: [line.number("heads"), line.number("kv_heads")],
        dims: [line.number("qk_dim"), line.number("v_dim")],
        source: line.cell("source"),
        tflops: line.number("tflops"),
    });
    rows.collect()
});

static GROUPED: LazyLock<Vec<GroupedRow>> = LazyLock::new(|| {
    let rows = file!("grouped_gemm.csv").map(|line| GroupedRow {
        gpu: line.cell("gpu"),
        dtype: line.dtype("dtype"),
        pass: line.pass().expect("this table separates the passes"),
        groups: line.number("groups"),
        rows_per_group: line.number("rows_per_group"),
        widths: [line.number("n"), line.number("k")],
        tflops: line.number("tflops"),
    });
    rows.collect()
});

static FUSED_MOE: LazyLock<Vec<FusedMoeRow>> = LazyLock::new(|| {
    let mut rows = Vec::new();
    for line in file!("fused_moe.csv") {
        let model = ["hidden", "width", "experts", "topk", "ep"].map(|name| line.number(name));
        for (tokens, tflops) in line.series("t") {
            rows.push(FusedMoeRow {
                gpu: line.cell("gpu"),
                dtype: line.dtype("dtype"),
                model,
                tokens,
                tflops,
            });
        }
    }
    rows
});

static COLLECTIVES: LazyLock<Vec<CollectiveRow>> = LazyLock::new(|| {
    let rows = file!("collectives.csv").map(|line| CollectiveRow {
        gpu: line.cell("gpu"),
        kind: line.kind(),
        ranks: line.number("ranks"),
        latency_us_min: line.number("latency_us_min"),
        busbw: line
            .series("mib")
            .into_iter()
            .map(|(mib, rate)| (mib << 20, rate))
            .collect(),
    });
    rows.collect()
});

static INTER_NODE: LazyLock<Vec<InterNodeRow>> = LazyLock::new(|| {
    let rows = file!("inter_node.csv").map(|line| InterNodeRow {
        cluster: line.cell("cluster"),
        kind: line.kind(),
        ranks: [line.number("ranks"), line.number("ranks_per_domain")],
        bytes: line.number("bytes"),
        busbw: line.number("busbw"),
    });
    rows.collect()
});

static DISPATCH: LazyLock<Vec<DispatchRow>> = LazyLock::new(|| {
    let rows = file!("dispatch.csv").map(|line| DispatchRow {
        gpu: line.cell("gpu"),
        kernel: line.cell("kernel"),
        ranks: [line.number("ranks"), line.number("ranks_per_domain")],
        tokens: line.number("tokens"),
        hidden: line.number("hidden"),
        topk: line.number("topk"),
        experts: line.number("experts"),
        dispatch_dtype: line.dtype("dispatch_dtype"),
        dispatch_us: line.number("dispatch_us"),
        combine_us: line.number("combine_us"),
    });
    rows.collect()
});

/// Dense products, forward.
pub fn gemm() -> &'static [GemmRow] {
    &GEMM
}

/// Fastest products.
pub fn matmul_max() -> &'static [CeilingRow] {
    &CEILINGS
}

/// Attention by sequence length.
pub fn attention() -> &'static [AttentionRow] {
    &ATTENTION
}

/// Attention by heads.
pub fn attention_heads() -> &'static [HeadsRow] {
    &HEADS
}

/// Grouped products of training.
pub fn grouped_gemm() -> &'static [GroupedRow] {
    &GROUPED
}

/// Whole fused MoE forwards.
pub fn fused_moe() -> &'static [FusedMoeRow] {
    &FUSED_MOE
}

/// Collectives inside a domain.
pub fn collectives() -> &'static [CollectiveRow] {
    &COLLECTIVES
}

/// Collectives across nodes.
pub fn inter_node() -> &'static [InterNodeRow] {
    &INTER_NODE
}

/// Expert dispatch and combine.
pub fn dispatch() -> &'static [DispatchRow] {
    &DISPATCH
}

/// Hash of all shipped tables (BLAKE3, hexadecimal), for a plan to name them by.
pub fn hash() -> String {
    let mut hasher = blake3::Hasher::new();
    for text in [
        include_str!("../data/measured/gemm.csv"),
        include_str!("../data/measured/matmul_max.csv"),
        include_str!("../data/measured/attention.csv"),
        include_str!("../data/measured/attention_heads.csv"),
        include_str!("../data/measured/grouped_gemm.csv"),
        include_str!("../data/measured/collectives.csv"),
        include_str!("../data/measured/inter_node.csv"),
        include_str!("../data/measured/dispatch.csv"),
    ] {
        hasher.update(text.as_bytes());
    }
    hasher.finalize().to_hex().to_string()
}

/// What was measured on a GPU, one line a table, for a person to read.
pub fn summary(gpu: &str) -> Vec<String> {
    let mut lines = Vec::new();
    let mut say = |count: usize, what: &str| {
        if count > 0 {
            lines.push(format!("{count} {what}"));
        }
    };
    for dtype in [Dtype::Bf16, Dtype::Fp8, Dtype::Fp4] {
        let here = GEMM
            .iter()
            .filter(|row| row.gpu == gpu && row.dtype == dtype);
        say(here.count(), &format!("{dtype} matrix products"));
    }
    say(
        GROUPED.iter().filter(|row| row.gpu == gpu).count(),
        "grouped products by pass",
    );
    let attention = ATTENTION.iter().filter(|row| row.gpu == gpu).count();
    let heads = HEADS.iter().filter(|row| row.gpu == gpu).count();
    say(attention + heads, "attention shapes");
    let sizes = COLLECTIVES.iter().filter(|row| row.gpu == gpu);
    say(
        sizes.map(|row| row.busbw.len()).sum(),
        "sizes of collectives in a domain",
    );
    say(
        DISPATCH.iter().filter(|row| row.gpu == gpu).count(),
        "expert dispatches and combines",
    );
    lines
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::collective::CollectiveKind;
    use crate::presets;

    #[test]
    fn golden_rows_are_read_as_printed() {
        let h100 = gemm()
            .iter()
            .find(|row| {
                row.gpu == "h100" && row.dtype == Dtype::Bf16 && row.shape == [4096, 4096, 4096]
            })
            .expect("the row is there");
        assert_eq!(h100.tflops, 789.0);
        let reduce = collectives()
            .iter()
            .find(|row| {
                row.gpu == "h100" && row.kind == CollectiveKind::AllReduce && row.ranks == 8
            })
            .expect("the row is there");
        assert_eq!(reduce.busbw[4], (256 << 20, 430.1));
        assert_eq!(reduce.latency_us_min, 15.6);
        assert_eq!(
            inter_node()
                .iter()
                .filter(|row| row.cluster == "aws-p6-b200")
                .count(),
            15
        );
    }

    #[test]
    fn law_every_row_names_a_preset_and_is_below_peak() {
        let check = |name: &str, dtype, tflops: f64| {
            let gpu = presets::gpu(name).expect("a preset");
            let peak = gpu.peak(dtype).expect("the device computes in it").tflops();
            assert!(
                tflops > 0.0 && tflops < peak,
                "{name} {dtype}: {tflops} of {peak}"
            );
        };
        for row in gemm() {
            check(row.gpu, row.dtype, row.tflops);
        }
        for row in attention() {
            check(row.gpu, Dtype::Bf16, row.tflops);
        }
        for row in attention_heads() {
            check(row.gpu, Dtype::Bf16, row.tflops);
        }
        for row in grouped_gemm() {
            check(row.gpu, row.dtype, row.tflops);
        }
        for row in fused_moe() {
            check(row.gpu, row.dtype, row.tflops);
        }
        for row in collectives() {
            // In-network sums take a reduction beyond the link rate in principle; none does here.
            let gpu = presets::gpu(row.gpu).expect("a preset");
            assert!(
                row.busbw
                    .iter()
                    .all(|&(_, rate)| rate < 1.05 * gpu.nvlink_gb_per_s)
            );
            assert!(row.busbw.windows(2).all(|pair| pair[0].0 < pair[1].0));
        }
        for row in dispatch() {
            assert!(presets::gpu(row.gpu).is_ok() && row.dispatch_us > 0.0 && row.combine_us > 0.0);
        }
        for row in inter_node() {
            assert!(presets::cluster(row.cluster).is_ok() && row.busbw > 0.0);
        }
    }

    #[test]
    fn the_summary_counts_what_is_there() {
        let lines = summary("h100").join("\n");
        assert!(lines.contains("96 bf16 matrix products"), "{lines}");
        assert!(summary("mi300x").is_empty());
    }
}
