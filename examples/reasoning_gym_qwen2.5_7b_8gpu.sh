#!/usr/bin/env bash
# GRPO on tasks of reasoning-gym, scored by their own verifiers, on Qwen2.5 7B: one node of 8 GPUs with 80 GB each.
# The recipe writes its prompts itself: TASKS names others, as tools/reasoning_gym_data.py takes them.
#
#   HF_MODEL=/path/to/Qwen2.5-7B-Instruct bash examples/reasoning_gym_qwen2.5_7b_8gpu.sh
#
# Further flags go to train_ppo.py and win over those below. DRY_RUN=1 checks everything without a GPU and prints the layout.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
: "${HF_MODEL:?the Hugging Face folder of the model}"
read -ra TASK_LIST <<<"${TASKS:-leg_counting countdown number_sorting zebra_puzzles}"
DATA_DIR=${DATA_DIR:-output/reasoning_gym_data}
"${PYTHON:-python}" tools/reasoning_gym_data.py "${TASK_LIST[@]}" --rows "${ROWS:-2000}" --seed 1 --out "$DATA_DIR/train.jsonl"
"${PYTHON:-python}" tools/reasoning_gym_data.py "${TASK_LIST[@]}" --rows "${EVAL_ROWS:-50}" --seed 2 --out "$DATA_DIR/eval.jsonl"
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-8}
export CUDA_DEVICE_MAX_CONNECTIONS=1 # tensor parallelism: communication is launched in the order of the code

MODEL=(--hf-model "$HF_MODEL" --bf16)
# 2 data-parallel ranks x TP 4: with 4 KV heads a rank holds one KV group, so that the engine reads every weight in place.
LAYOUT=(--tensor-model-parallel-size 4 --pipeline-model-parallel-size 1 --rollout-tensor-parallel-size 4)
DATA=(--train-data "$DATA_DIR/train.jsonl" --max-prompt-length 1024)
PROMPT=(--system-prompt "Think step by step, then write the answer alone inside <answer></answer>.")
EVAL=(--eval-data "$DATA_DIR/eval.jsonl" --eval-interval 20)
REWARD=(--reward reasoning_gym --reward-workers 8)
ROLLOUT=(--rollout-batch-size 128 --n-samples-per-prompt 8 --max-response-length 2048 --temperature 1.0)
ALGORITHM=(--advantage-estimator grpo --policy-loss ppo --clip-low 0.2 --clip-high 0.2)
KL=(--kl-coef 0.001 --kl-in loss --kl-estimator k3)
OPTIMIZER=(--lr 1e-6 --lr-warmup-iters 10 --clip-grad 1.0 --use-distributed-optimizer)
BATCHES=(--global-batch-size 256 --max-tokens-per-micro-batch 16384)
RUN=(--train-iters 200 --output-dir output/reasoning_gym_qwen2.5_7b)

LAUNCH=(torchrun --standalone --nproc_per_node 8 train_ppo.py)
if [[ ${DRY_RUN:-0} == 1 ]]; then LAUNCH=("${PYTHON:-python}" train_ppo.py --dry-run --world-size 8); fi
exec "${LAUNCH[@]}" "${MODEL[@]}" "${LAYOUT[@]}" "${DATA[@]}" "${PROMPT[@]}" "${EVAL[@]}" "${REWARD[@]}" \
    "${ROLLOUT[@]}" "${ALGORITHM[@]}" "${KL[@]}" "${OPTIMIZER[@]}" "${BATCHES[@]}" "${RUN[@]}" "$@"
