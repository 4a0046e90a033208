"""Times PyTorch's ops at the sizes of `moefold gpu-check`, as it times its own.

Reads a JSON list of sizes on stdin; prints one JSON object a line: {"sizes", "case", "median_s"} or {"sizes", "case", "error"}.
Each run is between two CUDA events, with the level-two cache overwritten before it. bf16, random values.
"""

import json
import sys

import torch
import torch.nn.functional as F

RUNS, WARMUP = 30, 5
DEVICE, BF16 = "cuda", torch.bfloat16


def median_seconds(step):
    """Median time of `step` on the device."""
    for _ in range(WARMUP):
        step()
    flush = torch.empty(256 << 20, dtype=torch.int8, device=DEVICE)
    times = []
    for _ in range(RUNS):
        flush.fill_(1)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        step()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return sorted(times)[RUNS // 2]


def random(*dims, dtype=BF16, grad=False):
    return torch.randn(*dims, device=DEVICE, dtype=dtype).requires_grad_(grad)


def backward_of(outputs, inputs, grad):
    """A step that runs the backward of a graph made once."""
    return lambda: torch.autograd.grad(outputs, inputs, grad, retain_graph=True)


def dense(s):
    t, h = s["tokens"], s["hidden"]
    n = (s["heads"] + s["kv_heads"]) * s["qk_dim"] + s["kv_heads"] * s["v_dim"]
    x, w, dy = random(t, h), random(n, h), random(t, n)
    yield "gemm::forward qkv", lambda: x @ w.T
    yield "gemm::dgrad qkv", lambda: dy @ w
    yield "gemm::wgrad qkv", lambda: dy.T @ x
    rows, width = t * s["topk"], 2 * s["width"]
    a, b = random(rows, h), random(width, h)
    yield "gemm::forward dense peer of fc1", lambda: a @ b.T


def experts(s):
    grouped = getattr(F, "grouped_mm", None) or torch._grouped_mm
    rows, e = s["tokens"] * s["topk"], s["experts"]
    for load, counts in s["loads"]:
        ends = torch.tensor(counts, device=DEVICE).cumsum(0).to(torch.int32)
        for name, n, k in (("fc1", 2 * s["width"], s["hidden"]), ("fc2", s["hidden"], s["width"])):
            x, w, dy = random(rows, k), random(e, n, k), random(rows, n)
            yield f"grouped_gemm::forward {name} {load}", lambda: grouped(x, w.transpose(1, 2), offs=ends)
            yield f"grouped_gemm::dgrad {name} {load}", lambda: grouped(dy, w, offs=ends)
            yield f"grouped_gemm::wgrad {name} {load}", lambda: grouped(dy.T, x, offs=ends)
    x, f = random(rows, 2 * s["width"], grad=True), s["width"]
    dy = random(rows, f)
    yield "swiglu::forward", lambda: F.silu(x[:, :f]) * x[:, f:]
    yield "swiglu::backward", backward_of(F.silu(x[:, :f]) * x[:, f:], [x], dy)


def attention(s):
    b, length = s["seqs"], s["tokens"] // s["seqs"]
    q = random(b, s["heads"], length, s["qk_dim"], grad=True)
    k = random(b, s["kv_heads"], length, s["qk_dim"], grad=True)
    v = random(b, s["kv_heads"], length, s["v_dim"], grad=True)
    attend = lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    yield "attention::forward", lambda: attend().detach()
    out = attend()
    yield "attention::backward", backward_of(out, [q, k, v], torch.randn_like(out))


def rows(s):
    t, h, vocab = s["tokens"], s["hidden"], s["vocab"]
    for name, count, width in (("hidden", t, h), ("head", t * s["heads"], s["qk_dim"])):
        x, w, dy = random(count, width, grad=True), random(width, grad=True), random(count, width)
        yield f"rms_norm::forward {name}", lambda: F.rms_norm(x, (width,), w, 1e-6).detach()
        yield f"rms_norm::backward {name}", backward_of(F.rms_norm(x, (width,), w, 1e-6), [x, w], dy)
    logits, targets = random(t, vocab, grad=True), torch.randint(vocab, (t,), device=DEVICE)
    yield "cross_entropy::forward", lambda: F.cross_entropy(logits, targets).detach()
    yield "cross_entropy::finish", backward_of(F.cross_entropy(logits, targets), [logits], torch.ones((), device=DEVICE, dtype=BF16))
    table, dy = random(vocab, h, grad=True), random(t, h)
    yield "embedding::forward", lambda: F.embedding(targets, table).detach()
    yield "embedding::backward", backward_of(F.embedding(targets, table), [table], dy)
    a, b = random(t, h), random(t, h)
    yield "elementwise::add", lambda: a + b
    index = torch.randint(t, (t * s["topk"],), device=DEVICE)
    yield "rows::gather", lambda: a[index]
    weights = torch.nn.Parameter(random(h * s["width"], dtype=torch.float32))
    weights.grad = random(h * s["width"], dtype=torch.float32)
    optimizer = torch.optim.AdamW([weights], lr=1e-3, fused=True)
    yield "adamw::step", optimizer.step


def main():
    torch.manual_seed(0)
    print(json.dumps({"torch": torch.__version__, "cudnn": torch.backends.cudnn.version()}), flush=True)
    for sizes in json.load(sys.stdin):
        for family in (dense, experts, attention, rows):
            try:
                for case, step in family(sizes):
                    line = {"sizes": sizes["name"], "case": case}
                    try:
                        line["median_s"] = median_seconds(step)
                    except Exception as error:  # one op that a build of PyTorch lacks is no reason to stop
                        line["error"] = str(error).splitlines()[0]
                    print(json.dumps(line), flush=True)
            except Exception as error:
                print(json.dumps({"sizes": sizes["name"], "case": family.__name__, "error": str(error).splitlines()[0]}), flush=True)
            torch.cuda.empty_cache()


main()
