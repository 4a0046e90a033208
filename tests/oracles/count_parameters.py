"""Exact parameter counts of the presets, summed over real module trees, and their transformers-5 configurations.

    python count_parameters.py > ../../planner/tests/fixtures/parameters.csv
    python count_parameters.py --v5 > ../../planner/tests/fixtures/transformers_v5.json

Needs torch and transformers 5.23. Every model of planner/models is built on the meta device, which holds shapes only.
Active parameters: a routed expert's tensors count top-k times instead of once an expert; `no_embedding` leaves the input
embedding out, `body` the head too. A tied matrix counts as the head. Multi-token prediction is not built by transformers: its
layer is one decoder layer of the kind that the checkpoint's has, plus a 2h x h projection and three norms
(DeepSeek-V3, arXiv 2412.19437, section 2.2), and for DeepSeek-V4 the head that merges its residual streams.
Ling's code is not part of transformers; Glm4Moe with Ling's sizes has the same tensors but for q, k, v being apart.
"""
import copy, glob, json, os, re, sys
import torch
from transformers import AutoModelForCausalLM, CONFIG_MAPPING

HERE = os.path.dirname(os.path.abspath(__file__))
MODELS = os.path.join(HERE, "..", "..", "planner", "models")
OURS = {"bench-deepseek-v3", "bench-mixtral", "bench-qwen3-moe", "quickstart", "tiny-mixtral"}


def config_of(raw):
    """A transformers configuration with the sizes of a preset."""
    raw = copy.deepcopy(raw)
    kind = raw.pop("model_type")
    if kind == "llama4":
        raw, kind = raw["text_config"], raw["text_config"].pop("model_type")
    if kind == "kimi_k2":
        kind = "deepseek_v3"
    if kind == "minimax_text_01":
        kind = "minimax"
        raw["layer_types"] = ["full_attention" if softmax else "linear_attention" for softmax in raw.pop("attn_type_list")]
    if kind == "phimoe":  # the presets leave the factors out
        half = raw["hidden_size"] // raw["num_attention_heads"] // 2
        raw["rope_scaling"] = dict(raw["rope_scaling"], short_factor=[1.0] * half, long_factor=[1.0] * half)
    if kind == "dbrx":
        raw["ffn_config"]["moe_normalize_expert_weights"] = float(raw["ffn_config"]["moe_normalize_expert_weights"])
    if kind == "bailing_moe":
        kind = "glm4_moe"
        assert raw.pop("moe_shared_expert_intermediate_size") == raw["moe_intermediate_size"]
        raw["n_routed_experts"], raw["n_shared_experts"] = raw.pop("num_experts"), raw.pop("num_shared_experts")
    raw.pop("architectures", None)
    return kind, CONFIG_MAPPING[kind](**raw)


def shapes(config):
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    return {name: tuple(p.shape) for name, p in model.named_parameters()}


def size(shape):
    return torch.Size(shape).numel()


def layer_size(tensors, index):
    return sum(size(s) for name, s in tensors.items() if re.search(rf"\.layers\.{index}\.", name))


def mtp(name, raw, config, tensors):
    depths = raw.get("num_nextn_predict_layers", 1 if raw["model_type"] == "qwen3_next" else 0)
    if not depths:
        return 0
    hidden, last = config.hidden_size, config.num_hidden_layers - 1
    extra = 0
    if raw["model_type"] == "deepseek_v4":  # its depth attends in a window only, and merges its streams
        ratio = raw["compress_ratios"][last + 1]
        one = dict(raw, compress_ratios=[ratio] * len(raw["compress_ratios"]))
        tensors, last = shapes(config_of(one)[1]), 0
        extra = sum(size(s) for n, s in tensors.items() if ".hc_head." in n)
    return depths * (layer_size(tensors, last) + 2 * hidden * hidden + 3 * hidden + extra)


def counts(name, raw):
    kind, config = config_of(raw)
    tensors = shapes(config)
    first = lambda *names: next((getattr(config, n) for n in names if getattr(config, n, None)), 0)
    routed = getattr(config, "ffn_config", config)
    experts = getattr(routed, "moe_num_experts", 0) or first("num_local_experts", "num_experts", "n_routed_experts")
    topk = getattr(routed, "moe_top_k", 0) or first("num_experts_per_tok")
    total = active = 0
    for tensor, shape in tensors.items():
        total += size(shape)
        if re.search(r"\.experts\.(?!.*shared)", tensor):
            share = size(shape) * topk
            assert share % experts == 0, tensor
            active += share // experts
        else:
            active += size(shape)
    embedding = size(next(s for n, s in tensors.items() if re.search(r"(embed_tokens|embeddings|wte)\.weight$", n)))
    head = sum(size(s) for n, s in tensors.items() if n.startswith("lm_head"))
    without = active - (embedding if head else 0)
    return total, active, without, without - (head or embedding), mtp(name, raw, config, tensors)


def main():
    presets = {os.path.basename(f)[:-5]: json.load(open(f)) for f in sorted(glob.glob(os.path.join(MODELS, "*.json")))}
    if "--v5" in sys.argv:
        seen, saved = set(), {}
        for name, raw in presets.items():
            if name in OURS or raw["model_type"] in seen or raw["model_type"] in ("bailing_moe", "kimi_k2"):
                continue
            seen.add(raw["model_type"])
            kind, config = config_of(raw)
            full = json.loads(config.to_json_string(use_diff=False))
            for clutter in ("id2label", "label2id", "transformers_version", "chunk_size_feed_forward", "return_dict", "_name_or_path"):
                full.pop(clutter, None)
            saved[name] = full
        print("{" + ",\n".join(f"{json.dumps(n)}: {json.dumps(c, sort_keys=True)}" for n, c in saved.items()) + "}")
        return
    print("name,total,active,active_no_embedding,active_body,mtp")
    for name, raw in presets.items():
        print(",".join(map(str, (name, *counts(name, raw)))))


main()
