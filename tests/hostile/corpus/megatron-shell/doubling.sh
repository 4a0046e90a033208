A=--num-layers
A="$A $A"
A="$A $A"
ARRAY=(--bf16 $A)
ARRAY=("${ARRAY[@]}" "${ARRAY[@]}")
B=${C:-${D:-${E:-"2 $A"}}}
B+=" $B"
torchrun pretrain_gpt.py "${ARRAY[@]}" $B --hidden-dropout 0.0
