#!/usr/bin/env bash
# RLOO (REINFORCE, the baseline is the mean of a prompt's other samples; arXiv 2402.14740) on Qwen2.5 7B: one node of
# 8 GPUs with 80 GB each. Rows of TRAIN_DATA: prompt and label.
#
#   HF_MODEL=/path/to/Qwen2.5-7B-Instruct TRAIN_DATA=/path/to/math.jsonl bash examples/rloo_qwen2.5_7b_8gpu.sh
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
REWARD=(--reward math_verify --reward-workers 8)
ROLLOUT=(--rollout-batch-size 128 --n-samples-per-prompt 4 --max-response-length 3072 --temperature 1.0)
ALGORITHM=(--advantage-estimator rloo --policy-loss reinforce)
KL=(--kl-coef 0.01 --kl-in reward --kl-estimator k1)
OPTIMIZER=(--lr 1e-6 --lr-warmup-iters 10 --clip-grad 1.0 --use-distributed-optimizer)
BATCHES=(--global-batch-size 512 --max-tokens-per-micro-batch 16384) # one optimizer step: on-policy, as RLOO is meant
RUN=(--train-iters 200 --output-dir output/rloo_qwen2.5_7b)

LAUNCH=(torchrun --standalone --nproc_per_node 8 train_ppo.py)
if [[ ${DRY_RUN:-0} == 1 ]]; then LAUNCH=("${PYTHON:-python}" train_ppo.py --dry-run --world-size 8); fi
exec "${LAUNCH[@]}" "${MODEL[@]}" "${LAYOUT[@]}" "${DATA[@]}" "${REWARD[@]}" "${ROLLOUT[@]}" "${ALGORITHM[@]}" \
    "${KL[@]}" "${OPTIMIZER[@]}" "${BATCHES[@]}" "${RUN[@]}" "$@"
