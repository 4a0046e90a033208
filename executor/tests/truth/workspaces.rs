//! What ops work in on GPUs is what the planner declares of them, byte for byte, at sizes where sums are
//! made over several blocks.

use moefold_kernels::router::{self, RouterRule, Score};
use moefold_kernels::{
    Device, Dtype, Scalars, Tensor, TensorClass, attention, embedding, permute, rms_norm, rows,
};
use moefold_planner::stack::moefold::Device as On;

use crate::cuda::{BF16, Emulated, F32, HOPPER};

const CLASS: TensorClass = TensorClass::Activations;

/// Bytes that are alive inside `op` beside what it returns.
fn worked_in<T>(device: &Device, op: impl FnOnce() -> T) -> u64 {
    device.reset_peak();
    let returned = op();
    let memory = device.memory();
    drop(returned);
    memory.peak_total().0 - memory.live_total().0
}

fn floats(device: &Device, dtype: Dtype, dims: &[usize]) -> Tensor {
    device.zeros(CLASS, dtype, dims)
}

/// Every kind of device with what is declared for it, where there is a compiler.
fn each(check: impl Fn(&Device, On)) {
    let kinds: [(Emulated, u32); 3] = [(F32, 80), (BF16, 80), (HOPPER, 90)];
    for (on, capability) in kinds {
        if on.is_there() {
            check(&on.open(), On::cuda(capability));
        }
    }
    check(&Device::cpu(1), On::Cpu);
}

#[test]
fn law_norms_work_in_what_is_declared() {
    each(|device, on| {
        for [rows, width] in [[3, 8], [600, 32], [20, 2048], [70, 129], [9, 12]] {
            let dtype = device.dtype();
            let x = floats(device, dtype, &[rows, width]);
            let w = floats(device, dtype, &[width]);
            let dw = floats(device, Dtype::F32, &[width]);
            let (y, rstd) = rms_norm::forward(&x, &w, 1e-6);
            let found = worked_in(device, || rms_norm::backward(&y, &x, &w, &rstd, &dw));
            let declared = 4 * on.norm_sums(dtype, rows as u64, width as u64);
            assert_eq!(found, declared, "{device:?} [{rows}, {width}]");
        }
    });
}

#[test]
fn law_attention_works_in_what_is_declared() {
    each(|device, on| {
        let dtype = device.dtype();
        for (seqs, seq_len, heads, kv_heads, width) in
            [(1, 16, 2, 1, 8), (2, 80, 2, 2, 16), (1, 70, 2, 1, 12)]
        {
            let dims = |heads| [seqs * seq_len, heads, width];
            let q = floats(device, dtype, &dims(heads));
            let [k, v] = [(); 2].map(|()| floats(device, dtype, &dims(kv_heads)));
            let what = format!("{device:?} {seqs} x {seq_len}, {heads} of {width}");
            let tickets = 4 * on.attention_tickets(dtype, width as u64);
            let forward = worked_in(device, || attention::forward(&q, &k, &v, seqs, 1.0));
            assert_eq!(forward, tickets, "{what}: forward");
            let (o, lse) = attention::forward(&q, &k, &v, seqs, 1.0);
            let found = worked_in(device, || {
                attention::backward(&o, &q, &k, &v, &o, &lse, seqs, 1.0)
            });
            let pairs = (heads * seqs) as u64;
            let work = on.attention_backward(dtype, pairs, seq_len as u64, width as u64);
            assert_eq!(found, 4 * (work.sums + work.turns), "{what}: backward");
        }
    });
}

#[test]
fn law_routing_works_in_what_is_declared() {
    let rule = RouterRule {
        score: Score::SoftmaxThenTopk,
        normalize: false,
        scale: 1.0,
        groups: None,
    };
    each(|device, on| {
        for tokens in [5, 70] {
            let logits = floats(device, Dtype::F32, &[tokens, 8]);
            let plain = worked_in(device, || router::forward(&logits, 2, &rule, None));
            assert_eq!(plain, 0, "{device:?}");
            let found = worked_in(device, || {
                router::forward_with_stats(&logits, 2, &rule, None)
            });
            assert_eq!(found, 4 * on.router_sums(tokens as u64, 8), "{device:?}");
        }
        for tokens in [5, 300, 35_000] {
            let ids = device.zeros(CLASS, Dtype::I32, &[tokens, 2]);
            let found = worked_in(device, || permute::sort(&ids, 4));
            let declared = 4 * on.sorting(2 * tokens as u64, 4);
            assert_eq!(found, declared, "{device:?} {tokens} tokens");
        }
        let x = floats(device, device.dtype(), &[9, 4]);
        let chunks = [4..9, 2..2, 0..4];
        let found = worked_in(device, || rows::gather_chunks(&x, &chunks));
        assert_eq!(found, 4 * on.chunks(2), "{device:?} there");
        let found = worked_in(device, || rows::scatter_chunks(&x, &chunks));
        assert_eq!(found, 4 * on.chunks(2), "{device:?} back");
    });
}

#[test]
fn law_sums_and_lookups_work_in_what_is_declared() {
    each(|device, on| {
        let sums = Scalars::zeros(device, TensorClass::Transient, 1);
        for len in [3, 5000] {
            let x = floats(device, Dtype::F32, &[len]);
            let found = worked_in(device, || sums.add_sum(0, 1.0, &x));
            let declared = 4 * on.total(Dtype::F32, len as u64);
            assert_eq!(found, declared, "{device:?} {len}");
        }
        let ids = device.zeros(CLASS, Dtype::I32, &[10]);
        let dy = floats(device, device.dtype(), &[10, 8]);
        let table = floats(device, Dtype::F32, &[20, 8]);
        let found = worked_in(device, || embedding::backward(&dy, &ids, &table, 0));
        assert_eq!(found, 4 * on.embedding_order(10), "{device:?}");
    });
}
