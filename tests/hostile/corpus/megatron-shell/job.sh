#!/bin/bash
#SBATCH --nodes=8
export CUDA_DEVICE_MAX_CONNECTIONS=1
TP=2
PP=${PP:-4}
SEQ=4096
MODEL_ARGS=(
    --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336   # a comment
    --num-attention-heads 32 --group-query-attention --num-query-groups 8 --kv-channels 128
    --seq-length ${SEQ} --max-position-embeddings "$SEQ" --position-embedding-type rope --rotary-base 1000000
    --normalization RMSNorm --swiglu --disable-bias-linear --untie-embeddings-and-output-weights
    --vocab-size 32000 --make-vocab-size-divisible-by 128
)
MOE_ARGS="--num-experts 8 --moe-router-topk 2 --moe-router-load-balancing-type aux_loss \
  --moe-grouped-gemm --moe-token-dispatcher-type alltoall --expert-model-parallel-size 8"
if [ -n "$FP8" ]; then MOE_ARGS="$MOE_ARGS --fp8-format hybrid"; fi
torchrun --nproc_per_node 8 pretrain_gpt.py "${MODEL_ARGS[@]}" $MOE_ARGS --bf16 --hidden-dropout 0.0 --attention-dropout 0.0 \
  --tensor-model-parallel-size $TP --pipeline-model-parallel-size $PP --num-layers-per-virtual-pipeline-stage 2 \
  --sequence-parallel --use-distributed-optimizer --micro-batch-size 1 --global-batch-size 256 \
  --overlap-grad-reduce --overlap-param-gather --recompute-granularity selective --recompute-modules core_attn moe_act \
 
