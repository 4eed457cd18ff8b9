#!/usr/bin/env bash
# PPO on Llama 3 8B against a reward model: one node of 8 GPUs with 80 GB each. Rows of TRAIN_DATA: prompt.
# REWARD_MODEL is a ForSequenceClassification folder of one label, of any supported family; it runs on the policy's layout.
#
#   HF_MODEL=/path/to/Meta-Llama-3-8B-Instruct REWARD_MODEL=/path/to/reward-model TRAIN_DATA=/path/to/prompts.jsonl \
#       bash examples/ppo_reward_model_llama3_8b_8gpu.sh
#
# Further flags go to train_ppo.py and win over those below. DRY_RUN=1 checks everything without a GPU and prints the layout.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
: "${HF_MODEL:?the Hugging Face folder of the model}" "${TRAIN_DATA:?the file of prompts: jsonl, json, parquet or arrow}"
: "${REWARD_MODEL:?the Hugging Face folder of the reward model}"
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-8}
export CUDA_DEVICE_MAX_CONNECTIONS=1 # tensor parallelism: communication is launched in the order of the code

MODEL=(--hf-model "$HF_MODEL" --bf16)
# 2 data-parallel ranks x TP 4; the engine has the same TP, so that it reads the trainer's own weights.
LAYOUT=(--tensor-model-parallel-size 4 --pipeline-model-parallel-size 1 --rollout-tensor-parallel-size 4)
DATA=(--train-data "$TRAIN_DATA" --prompt-key prompt --max-prompt-length 1024)
REWARD=(--reward-model "$REWARD_MODEL")
ROLLOUT=(--rollout-batch-size 128 --n-samples-per-prompt 4 --max-response-length 1024 --temperature 1.0)
ALGORITHM=(--advantage-estimator gae --gamma 1.0 --gae-lambda 0.95 --policy-loss ppo --clip-low 0.2 --clip-high 0.2)
KL=(--kl-coef 0.02 --kl-in reward --kl-estimator k1)
CRITIC=(--critic-hf-model "$REWARD_MODEL" --critic-lr 5e-6 --critic-warmup-iters 10) # it starts as the reward model
OPTIMIZER=(--lr 1e-6 --lr-warmup-iters 10 --clip-grad 1.0 --use-distributed-optimizer)
BATCHES=(--global-batch-size 256 --max-tokens-per-micro-batch 16384)
RUN=(--train-iters 200 --output-dir output/ppo_reward_model_llama3_8b)

LAUNCH=(torchrun --standalone --nproc_per_node 8 train_ppo.py)
if [[ ${DRY_RUN:-0} == 1 ]]; then LAUNCH=("${PYTHON:-python}" train_ppo.py --dry-run --world-size 8); fi
exec "${LAUNCH[@]}" "${MODEL[@]}" "${LAYOUT[@]}" "${DATA[@]}" "${REWARD[@]}" "${ROLLOUT[@]}" "${ALGORITHM[@]}" \
    "${KL[@]}" "${CRITIC[@]}" "${OPTIMIZER[@]}" "${BATCHES[@]}" "${RUN[@]}" "$@"
