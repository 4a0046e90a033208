#!/usr/bin/env python3
"""Builds Megatron-Core's own configurations of what `moefold export --json` prints, read from stdin.

Megatron-Core is a package (`pip install megatron-core`); the argument parser of Megatron-LM is not part of it. So flags are handed to
the configuration classes as Megatron-LM does: by name, but for the few that are named otherwise there. Every flag must be a field of
one of the classes, or one of those that only the training script reads. The classes then judge the values.
"""
import dataclasses
import json
import sys
import types
import warnings

warnings.filterwarnings("ignore")

import torch
import torch.nn.functional as F
import megatron.core
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

try:
    import transformer_engine  # noqa: F401
except ImportError:
    # The classes ask Transformer Engine for its version and for fused kernels, and run neither here.
    import megatron.core.transformer.moe.moe_utils as moe_utils
    import megatron.core.utils as utils
    from packaging.version import Version

    utils.get_te_version = lambda: Version("2.14.0")
    for name in (
        "fused_permute", "fused_permute_with_probs", "fused_sort_chunks_by_index", "fused_sort_chunks_by_index_with_probs",
        "fused_unpermute", "fused_compute_score_for_moe_aux_loss", "fused_moe_aux_loss", "fused_topk_with_score_function",
    ):
        if getattr(moe_utils, name, None) is None:
            setattr(moe_utils, name, print)
    for name in ("transformer_engine", "transformer_engine.pytorch", "transformer_engine.pytorch.optimizers"):
        sys.modules[name] = types.ModuleType(name)
    sys.modules["transformer_engine.pytorch.optimizers"].FusedAdam = (
        lambda master_weight_dtype, exp_avg_dtype, exp_avg_sq_dtype, use_decoupled_grad, store_param_remainders: None
    )

# Fields that have another name than their flag.
RENAMED = {
    "num_experts": "num_moe_experts",
    "norm_epsilon": "layernorm_epsilon",
    "fp8_format": "fp8",
    "fp4_format": "fp4",
    "apply_layernorm_1p": "layernorm_zero_centered_gamma",
    "num_virtual_stages_per_pipeline_rank": "virtual_pipeline_model_parallel_size",
    "decoder_first_pipeline_num_layers": "num_layers_in_first_pipeline_stage",
    "decoder_last_pipeline_num_layers": "num_layers_in_last_pipeline_stage",
    "ddp_bucket_size": "bucket_size",
}
# Read by the training script alone.
TRAINING = {
    "max_position_embeddings", "position_embedding_type", "rotary_base", "rotary_percent", "use_rope_scaling", "rope_scaling_factor",
    "normalization", "untie_embeddings_and_output_weights", "tokenizer_type", "vocab_size", "make_vocab_size_divisible_by", "seq_length",
    "micro_batch_size", "global_batch_size", "mock_data", "train_iters", "eval_iters", "lr_decay_style", "log_interval", "log_throughput",
    "no_create_attention_mask_in_dataloader", "manual_gc", "manual_gc_interval", "ckpt_format", "group_query_attention",
    "swiglu", "squared_relu", "disable_bias_linear", "grad_reduce_in_bf16", "no_overlap_p2p_communication",
}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def value(field, words):
    """What a field takes of words."""
    if words is None:
        return True
    kind = str(field.type).lower()
    if field.name.endswith("_dtype") and "dtype" in kind:
        return DTYPES[words[0]]
    if field.name in ("moe_layer_freq", "linear_attention_freq"):
        return eval(words[0], {"__builtins__": {}})
    if field.name in ("recompute_modules", "offload_modules"):
        return words
    word = words[0] if len(words) == 1 else words
    for cast in (int, float):
        try:
            return cast(word)
        except (TypeError, ValueError):
            pass
    return word


def main():
    answer = json.load(sys.stdin)
    args = {one["flag"].lstrip("-").replace("-", "_"): one.get("values") for one in answer["args"]}
    latent = "multi_latent_attention" in args
    classes = {
        (MLATransformerConfig if latent else TransformerConfig): {},
        DistributedDataParallelConfig: {},
        OptimizerConfig: {},
    }
    for name, words in args.items():
        own = RENAMED.get(name, name)
        taken = name in TRAINING
        for kind, given in classes.items():
            for field in dataclasses.fields(kind):
                if field.name == own:
                    given[own] = value(field, words)
                    taken = True
        assert taken, f"Megatron-Core {megatron.core.__version__} has no field for --{name}"
    transformer, ddp, optimizer = classes.values()
    transformer["add_bias_linear"] = "disable_bias_linear" not in args
    transformer["gated_linear_unit"] = "swiglu" in args
    if "swiglu" in args:
        transformer["activation_func"] = F.silu
    transformer["batch_p2p_comm"] = "no_overlap_p2p_communication" in args
    transformer["overlap_p2p_comm"] = not transformer["batch_p2p_comm"]
    transformer["pipeline_dtype"] = torch.bfloat16 if "bf16" in args else torch.float32
    transformer["params_dtype"] = transformer["pipeline_dtype"]
    if "group_query_attention" not in args:
        transformer.pop("num_query_groups", None)
    ddp["grad_reduce_in_fp32"] = "grad_reduce_in_bf16" not in args
    config, _, _ = (kind(**given) for kind, given in classes.items())
    if args.get("pipeline_model_parallel_layout"):
        print("pipeline ranks:", len(config.pipeline_model_parallel_layout.layout))
    print("megatron-core", megatron.core.__version__, type(config).__name__, len(args), "flags")


main()
