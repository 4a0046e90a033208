"""Writes tests/fixtures/<name>/: tiny random Hugging Face models and what some AdamW steps do to them.

    python tests/oracles/make_fixtures.py tests/fixtures [NAME...]
                                              (needs torch, transformers >= 5, safetensors, numpy)

Every folder holds
    config.json        as transformers writes it (the v5 dialect: nested rope_parameters)
    model.safetensors  initial weights, as transformers writes them
    tokens.bin, .idx   a Megatron indexed dataset of one int32 document
    balance.json       of some: what losses that balance experts do to the same model, in microbatches
    capacity.json      of some: the same where experts have a capacity and drop tokens
    golden.json        hyper-parameters, loss and unclipped gradient norm of every step, and for every
                       initial and final tensor its sum and its L2 norm in double precision
Sample i is tokens[i*S : i*S+S+1] and step t takes samples t*B .. t*B+B-1; the loss is the mean token
cross entropy of the batch; gradients are clipped to a global L2 norm; weight decay is decoupled and
applies to tensors of two or more dimensions, biases of experts apart. The rate follows `schedule`. float32 on the CPU.
"""

import json
import math
import os
import struct
import sys
import tempfile

import numpy
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from transformers.modeling_layers import MtpLayer
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

SEQ_LEN, GLOBAL_BATCH, STEPS = 16, 24, 6
# These are from when it was five.
FIVE_STEPS = ("mixtral", "qwen3_moe", "qwen3_moe_raw", "qwen3_tied")
# Megatron-Core's default weight of multi-token prediction.
MTP_LOSS_SCALING_FACTOR = 0.1
HYPER = dict(lr=2e-3, betas=[0.9, 0.95], eps=1e-8, weight_decay=0.1, clip=1.0)

COMMON = dict(
    hidden_size=32,
    num_attention_heads=8,
    max_position_embeddings=64,
    tie_word_embeddings=False,
    router_aux_loss_coef=0.0,
    output_router_logits=False,
)
# Latent attention: keys wider than values, a part that all heads share, frequencies stretched by YaRN, whose
# factors neither cancel nor are one; compressed norms keep their own epsilon.
LATENT = dict(
    hidden_size=32,
    num_attention_heads=8,
    num_key_value_heads=8,
    kv_lora_rank=16,
    qk_nope_head_dim=8,
    qk_rope_head_dim=8,
    v_head_dim=12,
    max_position_embeddings=64,
    rms_norm_eps=1e-5,
    tie_word_embeddings=False,
    rope_parameters=dict(rope_type="yarn", rope_theta=1e4, factor=4.0, original_max_position_embeddings=16,
                         beta_fast=2.0, beta_slow=0.25, mscale=1.0, mscale_all_dim=0.7),
)
MODELS = {
    # Every layer sparse; top-2 of 8, renormalized; no head_dim key, heads divide the hidden size.
    "mixtral": (
        "mixtral",
        dict(COMMON, vocab_size=128, intermediate_size=16, num_hidden_layers=2, num_key_value_heads=4,
             num_local_experts=8, num_experts_per_tok=2, rms_norm_eps=1e-5, rope_theta=1e4, sliding_window=None),
    ),
    # A dense layer between two sparse ones, per-head q/k norms, explicit head_dim, top-3 of 8.
    "qwen3_moe": (
        "qwen3_moe",
        dict(COMMON, vocab_size=96, intermediate_size=48, moe_intermediate_size=16, num_hidden_layers=3,
             num_key_value_heads=2, head_dim=8, num_experts=8, num_experts_per_tok=3, norm_topk_prob=True,
             decoder_sparse_step=1, mlp_only_layers=[1], rms_norm_eps=1e-6, rope_theta=1e6, use_sliding_window=False),
    ),
    # The same family with probabilities left as the softmax over all experts gives them.
    "qwen3_moe_raw": (
        "qwen3_moe",
        dict(COMMON, vocab_size=64, intermediate_size=48, moe_intermediate_size=8, num_hidden_layers=1,
             num_key_value_heads=8, head_dim=4, num_experts=4, num_experts_per_tok=2, norm_topk_prob=False,
             decoder_sparse_step=1, mlp_only_layers=[], rms_norm_eps=1e-6, rope_theta=1e6, use_sliding_window=False),
    ),
    # Dense, embedding and head one matrix, a vocabulary that few degrees divide.
    "qwen3_tied": (
        "qwen3",
        dict(vocab_size=98, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
             num_key_value_heads=2, head_dim=8, max_position_embeddings=64, rms_norm_eps=1e-6, rope_theta=1e6,
             tie_word_embeddings=True, use_sliding_window=False),
    ),
    # Dense, without norms of heads, biases on all of attention.
    "llama": (
        "llama",
        dict(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=8,
             num_key_value_heads=2, max_position_embeddings=64, rms_norm_eps=1e-5, rope_theta=1e4,
             tie_word_embeddings=False, attention_bias=True),
    ),
    # Windows, of every layer, of every other one among the first, and of the last ones.
    "mixtral_windows": (
        "mixtral",
        dict(COMMON, vocab_size=64, intermediate_size=8, num_hidden_layers=1, num_key_value_heads=4,
             num_local_experts=4, num_experts_per_tok=2, rms_norm_eps=1e-5, rope_theta=1e4, sliding_window=4),
    ),
    "qwen2_moe_windows": (
        "qwen2_moe",
        dict(COMMON, vocab_size=64, intermediate_size=16, moe_intermediate_size=8, shared_expert_intermediate_size=8,
             num_hidden_layers=3, num_key_value_heads=2, num_experts=4, num_experts_per_tok=2, norm_topk_prob=False,
             mlp_only_layers=[0, 2], rms_norm_eps=1e-6, rope_theta=1e4, use_sliding_window=True, sliding_window=3,
             max_window_layers=2),
    ),
    "qwen3_windows": (
        "qwen3",
        dict(vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
             num_key_value_heads=2, head_dim=8, max_position_embeddings=64, rms_norm_eps=1e-6, rope_theta=1e6,
             tie_word_embeddings=False, use_sliding_window=True, sliding_window=6, max_window_layers=1),
    ),
    # Frequencies stretched as Llama 3.1's: of four pairs one is kept, one on the ramp, two slowed.
    "llama3": (
        "llama",
        dict(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4,
             num_key_value_heads=2, max_position_embeddings=64, rms_norm_eps=1e-5, tie_word_embeddings=False,
             rope_parameters=dict(rope_type="llama3", rope_theta=1e4, factor=8.0, original_max_position_embeddings=16,
                                  low_freq_factor=0.1, high_freq_factor=1.5)),
    ),
    # Sinks, a window on every other layer, biases everywhere, gates clamped where inputs are large, frequencies
    # stretched by YaRN whose ramp is not rounded.
    "gpt_oss": (
        "gpt_oss",
        dict(COMMON, vocab_size=64, intermediate_size=16, num_hidden_layers=2, num_key_value_heads=4, head_dim=8,
             num_local_experts=8, num_experts_per_tok=3, sliding_window=5, swiglu_limit=0.4, attention_bias=True,
             rms_norm_eps=1e-5, pad_token_id=None, eos_token_id=None,
             rope_parameters=dict(rope_type="yarn", rope_theta=1e4, factor=4.0, original_max_position_embeddings=16,
                                  beta_fast=2.0, beta_slow=0.25, truncate=False)),
    # Dense as Llama, nothing with a bias, a head width that is not hidden size over heads.
    "mistral": (
        "mistral",
        dict(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
             num_key_value_heads=2, head_dim=12, max_position_embeddings=64, rms_norm_eps=1e-5, rope_theta=1e4,
             tie_word_embeddings=False, sliding_window=None),
    ),
    # Every other layer dense, a shared expert behind its gate, biases on q, k and v.
    "qwen2_moe": (
        "qwen2_moe",
        dict(COMMON, vocab_size=80, intermediate_size=24, moe_intermediate_size=8, shared_expert_intermediate_size=16,
             num_hidden_layers=4, num_key_value_heads=2, num_experts=8, num_experts_per_tok=3, norm_topk_prob=False,
             decoder_sparse_step=2, mlp_only_layers=[], rms_norm_eps=1e-6, rope_theta=1e4, use_sliding_window=False),
    ),
    # Norms over whole projections, fewer key heads than query heads.
    "olmoe": (
        "olmoe",
        dict(COMMON, vocab_size=64, intermediate_size=16, num_hidden_layers=2, num_key_value_heads=4, num_experts=8,
             num_experts_per_tok=3, norm_topk_prob=False, rms_norm_eps=1e-5, rope_theta=1e4,
             # The embedding of padding would have no gradient.
             pad_token_id=None, eos_token_id=None),
    ),
    # A dense layer first; sigmoid scores with a correction bias, the best of two groups, scaled; a shared
    # expert; half of each head rotated, biases on q, k and v, norms of heads.
    "glm4_moe": (
        "glm4_moe",
        dict(COMMON, vocab_size=64, intermediate_size=24, moe_intermediate_size=8, num_hidden_layers=3,
             num_key_value_heads=2, head_dim=8, n_routed_experts=8, num_experts_per_tok=3, n_shared_experts=2,
             n_group=2, topk_group=1, routed_scaling_factor=1.5, norm_topk_prob=True, first_k_dense_replace=1,
             use_qk_norm=True, attention_bias=True, partial_rotary_factor=0.5, num_nextn_predict_layers=0,
             rms_norm_eps=1e-5, rope_theta=1e4),
    ),
    # Latent attention with compressed queries, neighbours rotated; a dense layer first, a shared expert, and
    # DeepSeek-V3's routing.
    "deepseek_v3": (
        "deepseek_v3",
        dict(LATENT, vocab_size=96, intermediate_size=24, moe_intermediate_size=8, num_hidden_layers=2, q_lora_rank=24,
             first_k_dense_replace=1, n_routed_experts=8, num_experts_per_tok=3, n_shared_experts=2, n_group=2,
             topk_group=1, routed_scaling_factor=2.5, norm_topk_prob=True, num_mtp_layers=0),
    ),
    # Queries projected at once; softmax scores, groups by their best expert, weights not normalized.
    "deepseek_v2": (
        "deepseek_v2",
        dict(LATENT, vocab_size=64, intermediate_size=24, moe_intermediate_size=8, num_hidden_layers=2, q_lora_rank=None,
             first_k_dense_replace=1, n_routed_experts=8, num_experts_per_tok=3, n_shared_experts=2, n_group=4,
             topk_group=2, topk_method="group_limited_greedy", routed_scaling_factor=4.0, norm_topk_prob=False),
    ),
    # Two depths of multi-token prediction behind one layer.
    "deepseek_v3_mtp": (
        "deepseek_v3",
        dict(LATENT, vocab_size=64, intermediate_size=24, moe_intermediate_size=8, num_hidden_layers=1, q_lora_rank=24,
             first_k_dense_replace=0, n_routed_experts=4, num_experts_per_tok=2, n_shared_experts=1, n_group=1,
             topk_group=1, routed_scaling_factor=2.5, norm_topk_prob=True, num_mtp_layers=2),
    ),
    # Halves rotated, every layer dense.
    "deepseek_v3_halves": (
        "deepseek_v3",
        dict(LATENT, vocab_size=98, intermediate_size=48, num_hidden_layers=1, first_k_dense_replace=1, q_lora_rank=None,
             num_mtp_layers=0, n_routed_experts=8, num_experts_per_tok=2, n_group=1, topk_group=1,
             rope_interleave=False),
    ),
}


def randomize(model, generator):
    """Weights far from any symmetric point: norms near one, everything else at 0.1."""
    biases = [b for name, b in model.named_buffers() if name.endswith("e_score_correction_bias")]
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            is_norm = parameter.ndim == 1 and not name.endswith(("bias", "sinks"))
            parameter.copy_(1 + 0.1 * noise if is_norm else 0.1 * noise)
        for bias in biases:
            bias.copy_(0.1 * torch.randn(bias.shape, generator=generator))


def write_indexed(prefix, tokens):
    """Megatron's indexed dataset, version 1, int32 (dtype code 4): one sequence, one document."""
    tokens.astype("<i4").tofile(prefix + ".bin")
    with open(prefix + ".idx", "wb") as index:
        index.write(b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 4, 1, 2))
        index.write(struct.pack("<iqqq", len(tokens), 0, 0, 1))


class Depths(torch.nn.ModuleList):
    """Multi-token prediction of DeepSeek-V3 (arXiv 2412.19437, section 2.2) from transformers' own layers, which
    it generates with and does not train. What comes from the model is normed, as it and Megatron-Core have it."""

    def __init__(self, model):
        config = model.config.get_mtp_config()
        block = model.model.layers[-1]
        layers = [MtpLayer(config, type(block), type(block.input_layernorm), depth)
                  for depth in range(model.config.num_mtp_layers)]
        super().__init__(layers)

    def losses(self, model, hidden, batch):
        """Of each depth the cross entropy of the tokens that have a target, over the number of all."""
        found = []
        count = batch.shape[0] * (batch.shape[1] - 1)
        for depth, layer in enumerate(self, 1):
            length = batch.shape[1] - 1 - depth
            hidden, ids, targets = hidden[:, :length], batch[:, depth:depth + length], batch[:, depth + 1:]
            positions = torch.arange(length)[None]
            mask = torch.full((length, length), float("-inf")).triu(1)[None, None]
            rotary = model.model.rotary_emb(hidden, positions)
            hidden = layer(model.model.embed_tokens(ids), hidden, position_embeddings=rotary, attention_mask=mask,
                           position_ids=positions, past_key_values=None)
            logits = model.lm_head(hidden)
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
            found.append(loss / count)
        return found

    def saved(self, first):
        """By the names of DeepSeek-V3's checkpoint, where depths follow the layers."""
        named = {}
        for name, tensor in self.state_dict().items():
            depth, rest = name.split(".", 1)
            rest = rest.replace("mtp_block.", "").replace("post_norm.", "shared_head.norm.")
            prefix = f"model.layers.{first + int(depth)}."
            if rest == "mlp.experts.gate_up_proj":
                for expert, both in enumerate(tensor):
                    for half, part in zip(("gate", "up"), both.chunk(2)):
                        named[f"{prefix}mlp.experts.{expert}.{half}_proj.weight"] = part.clone()
            elif rest == "mlp.experts.down_proj":
                for expert, part in enumerate(tensor):
                    named[f"{prefix}mlp.experts.{expert}.down_proj.weight"] = part.clone()
            else:
                named[prefix + rest] = tensor.clone()
        return named


def tensors(model, depths, folder):
    """Sum and norm of every tensor under the names that a saved checkpoint uses."""
    model.save_pretrained(folder)
    path = os.path.join(folder, "model.safetensors")
    saved = load_file(path)
    if depths:
        saved.update(depths.saved(model.config.num_hidden_layers))
        save_file(saved, path, metadata=dict(format="pt"))
    return {name: [t.double().sum().item(), t.double().norm().item()] for name, t in sorted(saved.items())}


# Losses of routers, by fixture: their coefficients, and the rate at which correction biases move.
BALANCED = dict(
    mixtral=[dict(aux=0.1), dict(seq=0.1), dict(glob=0.1), dict(z=0.01), dict(aux=0.02, seq=0.03, glob=0.04, z=0.005)],
    glm4_moe=[dict(aux=0.1), dict(seq=0.1), dict(rate=0.01)],
)
MICROBATCH, BALANCED_STEPS = 4, 3
# Capacities of experts, by fixture: the factor, what is kept, and losses beside it, which count before any is dropped.
CAPACITY = dict(
    mixtral=[dict(factor=1.0, policy="probs"), dict(factor=0.5, policy="position"), dict(factor=0.75, policy="probs", aux=0.1)],
    glm4_moe=[dict(factor=0.7, policy="probs"), dict(factor=1.1, policy="position", rate=0.01)],
)


def limited(case, experts, chosen, weights, dropped):
    """The weights of `chosen [tokens, topk]`, zero beyond the capacity of each of `experts`: Megatron-Core's rule. What
    is zero gives no output and has no gradient."""
    tokens, topk = chosen.shape
    capacity = math.ceil(tokens * topk / experts * case["factor"])
    kept = torch.ones_like(weights)
    for expert in range(experts):
        slots = (chosen.flatten() == expert).nonzero().flatten()
        if case["policy"] == "probs":
            slots = slots[weights.detach().flatten()[slots].argsort(descending=True, stable=True)]
        kept.view(-1)[slots[capacity:]] = 0
    dropped.append(int((kept == 0).sum()))
    return weights * kept


def logits_of(gate, tokens):
    return torch.nn.functional.linear(tokens.reshape(-1, tokens.shape[-1]).float(), gate.weight.float())


def choice(gate, logits, config):
    """What a router with a correction bias chooses, of the best groups (each scored by its best two)."""
    scores = logits.sigmoid() + gate.e_score_correction_bias
    groups = scores.view(len(scores), config.n_group, -1)
    best = groups.topk(2, dim=-1)[0].sum(-1).topk(config.topk_group, dim=-1)[1]
    kept = torch.zeros_like(groups[..., 0]).scatter(1, best, 1)[..., None].expand_as(groups)
    return scores.masked_fill(kept.reshape(scores.shape) == 0, 0.0).topk(config.num_experts_per_tok, dim=-1)[1]


def losses(logits, topk, single, case, running):
    """The losses of one router and microbatch, as Megatron-Core normalizes them on one rank."""
    tokens, experts = logits.shape
    scores = logits.sigmoid() if single else logits.softmax(-1)
    scores = scores / scores.sum(-1, keepdim=True)
    chosen = torch.zeros_like(logits).scatter(1, scores.topk(topk, dim=-1)[1], 1)
    running.append(chosen.sum(0))
    switch = lambda p, counts, n: experts / (topk * n * n) * (p * counts).sum()
    aux = case.get("aux", 0) * switch(scores.sum(0), chosen.sum(0), tokens)
    aux = aux + case.get("glob", 0) * switch(scores.sum(0), sum(running) / len(running), tokens)
    by_sequence = [t.view(-1, SEQ_LEN, experts).sum(1) for t in (scores, chosen)]
    aux = aux + case.get("seq", 0) * switch(*by_sequence, SEQ_LEN) / (tokens // SEQ_LEN)
    return aux, case.get("z", 0) * logits.logsumexp(-1).square().mean()


def balance(name, config, folder, stream, case):
    """Some steps of the model in `folder` under losses that balance its experts."""
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32)
    optimizer = adamw(model)
    gates = [m for m in model.modules() if type(m).__name__.endswith("TopkRouter") or type(m).__name__.endswith("TopKRouter")]
    seen, dropped = {}, []
    if "factor" in case:
        for experts in [m for m in model.modules() if type(m).__name__.endswith("Experts") or type(m).__name__.endswith("NaiveMoe")]:
            number = len(experts.gate_up_proj)
            hook = lambda _, args, number=number: (*args[:2], limited(case, number, args[1], args[2], dropped))
            experts.register_forward_pre_hook(hook)
    for gate in gates:
        gate.register_forward_hook(lambda gate, args, _: seen.__setitem__(gate, logits_of(gate, args[0])))
    topk, single = config.num_experts_per_tok, hasattr(gates[0], "e_score_correction_bias")
    model.train()
    steps = []
    for step in range(BALANCED_STEPS):
        record = dict(loss=0.0, aux_loss=0.0, z_loss=0.0)
        running = {gate: [] for gate in gates}
        load = {gate: 0 for gate in gates}
        optimizer.zero_grad()
        count = GLOBAL_BATCH // MICROBATCH
        for microbatch in range(count):
            first = step * GLOBAL_BATCH + microbatch * MICROBATCH
            batch = samples(stream, first, first + MICROBATCH)
            loss = cross_entropy(model(input_ids=batch[:, :-1], use_cache=False).logits, batch)
            both = [losses(seen[gate], topk, single, case, running[gate]) for gate in gates]
            aux, z = sum(aux for aux, _ in both), sum(z for _, z in both)
            ((loss + aux + z) / count).backward()
            for key, value in zip(record, (loss, aux, z)):
                record[key] += float(value) / count
            if "rate" in case:
                for gate in gates:
                    chosen = choice(gate, seen[gate], config).flatten()
                    load[gate] = load[gate] + torch.bincount(chosen, minlength=gate.weight.shape[0])
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), HYPER["clip"])
        optimizer.step()
        for gate in gates if "rate" in case else []:
            gate.e_score_correction_bias += case["rate"] * torch.sign(load[gate].float().mean() - load[gate])
        steps.append(dict(record, grad_norm=norm.item()))
        if "factor" in case:
            # Layer by layer within each microbatch.
            steps[-1]["dropped"] = [sum(dropped[i :: len(gates)]) for i in range(len(gates))]
            dropped.clear()
    biases = {n: b.tolist() for n, b in model.named_buffers() if n.endswith("e_score_correction_bias")}
    print(name, case, steps[-1])
    return dict(case=case, steps=steps, correction_biases=biases)


def adamw(model):
    # The biases of all experts are one tensor, and a vector for each.
    decays = lambda name, p: p.ndim >= 2 and not name.endswith("bias")
    decayed = [p for name, p in model.named_parameters() if decays(name, p)]
    plain = [p for name, p in model.named_parameters() if not decays(name, p)]
    groups = [dict(params=decayed, weight_decay=HYPER["weight_decay"]), dict(params=plain, weight_decay=0.0)]
    return torch.optim.AdamW(groups, lr=HYPER["lr"], betas=tuple(HYPER["betas"]), eps=HYPER["eps"])


def samples(stream, first, end):
    """Samples `first..end`, each with the token after it."""
    rows = [stream[i * SEQ_LEN : i * SEQ_LEN + SEQ_LEN + 1] for i in range(first, end)]
    return torch.from_numpy(numpy.stack(rows).astype("int64"))


def cross_entropy(logits, batch):
    """The mean loss of samples."""
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())


def write(path, value):
    with open(path, "w") as file:
        json.dump(value, file, indent=1)
        file.write("\n")


def make(name, model_type, config, out):
    seed = sum(map(ord, name))
    generator = torch.Generator().manual_seed(seed)
    config = CONFIG_MAPPING[model_type](**config)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32)
    depths = Depths(model) if getattr(config, "num_mtp_layers", 0) else None
    whole = torch.nn.ModuleList([model, depths] if depths else [model])
    randomize(whole, generator)
    folder = os.path.join(out, name)
    os.makedirs(folder, exist_ok=True)

    num_steps = 5 if name in FIVE_STEPS else STEPS
    count = SEQ_LEN * GLOBAL_BATCH * num_steps + 1
    stream = numpy.random.default_rng(seed).zipf(1.3, size=count) % config.vocab_size
    write_indexed(os.path.join(folder, "tokens"), stream)

    optimizer = adamw(whole)
    whole.train()
    steps = []
    with tempfile.TemporaryDirectory() as scratch:
        for step in range(num_steps):
            batch = samples(stream, step * GLOBAL_BATCH, (step + 1) * GLOBAL_BATCH)
            hidden = model.model(input_ids=batch[:, :-1], use_cache=False).last_hidden_state
            loss = cross_entropy(model.lm_head(hidden), batch)
            ahead = depths.losses(model, hidden, batch) if depths else []
            optimizer.zero_grad()
            (loss + MTP_LOSS_SCALING_FACTOR * sum(ahead) / max(len(ahead), 1)).backward()
            norm = torch.nn.utils.clip_grad_norm_(whole.parameters(), HYPER["clip"])
            if step == 0:
                initial = tensors(model, depths, folder)
            optimizer.step()
            steps.append(dict(loss=loss.item(), grad_norm=norm.item()))
            if depths:
                steps[-1]["mtp_losses"] = [loss.item() for loss in ahead]
        final = tensors(model, depths, scratch)
    for extra in ("generation_config.json",):
        path = os.path.join(folder, extra)
        if os.path.exists(path):
            os.remove(path)
    golden = dict(seq_len=SEQ_LEN, global_batch=GLOBAL_BATCH, **HYPER, steps=steps, initial=initial, final=final)
    write(os.path.join(folder, "golden.json"), golden)
    for file, knobs in (("balance.json", BALANCED), ("capacity.json", CAPACITY)):
        if name in knobs:
            cases = [balance(name, config, folder, stream, case) for case in knobs[name]]
            write(os.path.join(folder, file), dict(microbatch=MICROBATCH, cases=cases))
    print(name, sum(p.numel() for p in model.parameters()), [round(s["loss"], 4) for s in steps],
          [round(s["grad_norm"], 4) for s in steps])


if __name__ == "__main__":
    torch.set_num_threads(1)
    for name in sys.argv[2:] or MODELS:
        make(name, *MODELS[name], sys.argv[1])
