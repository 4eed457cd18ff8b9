#!/usr/bin/env bash
# DAPO (arXiv 2503.14476) on Qwen2.5 7B: one node of 8 GPUs with 80 GB each. Rows of TRAIN_DATA: prompt and label.
# Clip-higher, a loss that averages over tokens, groups with equal rewards dropped and replaced, a penalty for responses
# that come near the limit, no KL.
#
#   HF_MODEL=/path/to/Qwen2.5-7B-Instruct TRAIN_DATA=/path/to/math.jsonl bash examples/dapo_qwen2.5_7b_8gpu.sh
#
# Further flags go to train_ppo.py and win over those below. DRY_RUN=1 checks everything without a GPU and prints the layout.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
: "${HF_MODEL:?the Hugging Face folder of the model}" "${TRAIN_DATA:?the file of prompts: jsonl, json, parquet or arrow}"
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-8}
export CUDA_DEVICE_MAX_CONNECTIONS=1 # tensor parallelism: communication is launched in the order of the code

MODEL=(--hf-model "$HF_MODEL" --bf16)
# 2 data-parallel ranks x TP 4: with 4 KV heads a rank holds one KV group, so that the engine reads every weight in place.
LAYOUT=(--tensor-model-parallel-size 4 --pipeline-model-parallel-size 1 --rollout-tensor-parallel-size 4)
DATA=(--train-data "$TRAIN_DATA" --prompt-key prompt --label-key label --max-prompt-length 1024)
REWARD=(--reward math_verify --reward-workers 8 --overlong-buffer 2048 --overlong-penalty 1.0)
ROLLOUT=(--rollout-batch-size 128 --n-samples-per-prompt 16 --max-response-length 8192 --temperature 1.0)
SAMPLING=(--dynamic-sampling --max-sampling-rounds 10)
ALGORITHM=(--advantage-estimator grpo --policy-loss ppo --clip-low 0.2 --clip-high 0.28 --loss-aggregation token-mean)
OPTIMIZER=(--lr 1e-6 --lr-warmup-iters 20 --weight-decay 0.1 --clip-grad 1.0 --use-distributed-optimizer)
BATCHES=(--global-batch-size 512 --max-tokens-per-micro-batch 16384)
RUN=(--train-iters 200 --output-dir output/dapo_qwen2.5_7b)

LAUNCH=(torchrun --standalone --nproc_per_node 8 train_ppo.py)
if [[ ${DRY_RUN:-0} == 1 ]]; then LAUNCH=("${PYTHON:-python}" train_ppo.py --dry-run --world-size 8); fi
exec "${LAUNCH[@]}" "${MODEL[@]}" "${LAYOUT[@]}" "${DATA[@]}" "${REWARD[@]}" "${ROLLOUT[@]}" "${SAMPLING[@]}" \
    "${ALGORITHM[@]}" "${OPTIMIZER[@]}" "${BATCHES[@]}" "${RUN[@]}" "$@"
