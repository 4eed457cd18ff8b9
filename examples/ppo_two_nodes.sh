#!/usr/bin/env bash
# PPO with critic and reference on Qwen2.5 14B: two nodes of 8 GPUs with 80 GB each, joined by torchrun's rendezvous.
# The same command on both nodes, which see the same files; RDZV_HOST is the name of one of them:
#
#   RDZV_HOST=node0 HF_MODEL=/path/to/Qwen2.5-14B-Instruct TRAIN_DATA=/path/to/math.jsonl bash examples/ppo_two_nodes.sh
#
# Under SLURM: sbatch examples/ppo_two_nodes.slurm. Further flags go to train_ppo.py and win over those below.
# DRY_RUN=1 checks everything without a GPU and prints the layout.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
: "${HF_MODEL:?the Hugging Face folder of the model}" "${TRAIN_DATA:?the file of prompts: jsonl, json, parquet or arrow}"
: "${RDZV_HOST:?the host name of one of the nodes, the same on both}"
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-8}
export CUDA_DEVICE_MAX_CONNECTIONS=1 # tensor parallelism: communication is launched in the order of the code

MODEL=(--hf-model "$HF_MODEL" --bf16 --recompute-granularity full)
# 2 data-parallel ranks x PP 2 x TP 4 in training; 4 engines of TP 4 in rollout. TP stays within a node.
LAYOUT=(--tensor-model-parallel-size 4 --pipeline-model-parallel-size 2 --rollout-tensor-parallel-size 4)
DATA=(--train-data "$TRAIN_DATA" --prompt-key prompt --label-key label --max-prompt-length 1024)
REWARD=(--reward math_verify --reward-workers 8)
ROLLOUT=(--rollout-batch-size 256 --n-samples-per-prompt 4 --max-response-length 2048 --temperature 1.0)
ALGORITHM=(--advantage-estimator gae --gamma 1.0 --gae-lambda 1.0 --policy-loss ppo --clip-low 0.2 --clip-high 0.2)
KL=(--kl-coef 0.001 --kl-in reward --kl-estimator k1)
CRITIC=(--critic-lr 1e-5 --critic-warmup-iters 10)
OPTIMIZER=(--lr 1e-6 --lr-warmup-iters 10 --clip-grad 1.0 --use-distributed-optimizer)
BATCHES=(--global-batch-size 512 --max-tokens-per-micro-batch 8192)
RUN=(--train-iters 200 --output-dir output/ppo_two_nodes)

RENDEZVOUS=(--rdzv_backend c10d --rdzv_endpoint "$RDZV_HOST:${RDZV_PORT:-29400}" --rdzv_id "${RDZV_ID:-ppo_two_nodes}")
LAUNCH=(torchrun --nnodes 2 --nproc_per_node 8 "${RENDEZVOUS[@]}" train_ppo.py)
if [[ ${DRY_RUN:-0} == 1 ]]; then LAUNCH=("${PYTHON:-python}" train_ppo.py --dry-run --world-size 16); fi
exec "${LAUNCH[@]}" "${MODEL[@]}" "${LAYOUT[@]}" "${DATA[@]}" "${REWARD[@]}" "${ROLLOUT[@]}" "${ALGORITHM[@]}" \
    "${KL[@]}" "${CRITIC[@]}" "${OPTIMIZER[@]}" "${BATCHES[@]}" "${RUN[@]}" "$@"
