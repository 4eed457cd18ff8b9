#!/usr/bin/env bash
# DPO on Llama 3 8B: one node of 8 GPUs with 80 GB each. Rows of TRAIN_DATA: chosen and rejected, and prompt where it is apart.
#
#   HF_MODEL=/path/to/Meta-Llama-3-8B-Instruct TRAIN_DATA=/path/to/pairs.parquet bash examples/dpo_llama3_8b_8gpu.sh
#
# EVAL_DATA names held-out pairs. Further flags go to train_dpo.py and win over those below. DRY_RUN=1 checks everything without
# a GPU and prints the layout.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
: "${HF_MODEL:?the Hugging Face folder of the model}" "${TRAIN_DATA:?the file of pairs: jsonl, json, parquet or arrow}"
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-8}
export CUDA_DEVICE_MAX_CONNECTIONS=1 # tensor parallelism: communication is launched in the order of the code

MODEL=(--hf-model "$HF_MODEL" --bf16)
LAYOUT=(--tensor-model-parallel-size 2 --pipeline-model-parallel-size 1 --sequence-parallel) # 4 data-parallel ranks
DATA=(--train-data "$TRAIN_DATA" --max-length 2048 --max-prompt-length 1024 --overlong-prompts truncate)
EVAL=(--eval-interval 50)
if [[ -n ${EVAL_DATA:-} ]]; then EVAL+=(--eval-data "$EVAL_DATA"); fi
# one pass of the reference before training; its log-probabilities are kept under --output-dir for the next start
LOSS=(--dpo-loss sigmoid --beta 0.1 --reference precomputed)
OPTIMIZER=(--lr 5e-7 --lr-decay-style cosine --lr-warmup-iters 20 --clip-grad 1.0 --use-distributed-optimizer)
BATCHES=(--global-batch-size 128 --max-tokens-per-micro-batch 16384 --recompute-granularity full)
RUN=(--epochs 1 --output-dir output/dpo_llama3_8b --save output/dpo_llama3_8b/checkpoints --save-interval 100 --keep-last 2)

LAUNCH=(torchrun --standalone --nproc_per_node 8 train_dpo.py)
if [[ ${DRY_RUN:-0} == 1 ]]; then LAUNCH=("${PYTHON:-python}" train_dpo.py --dry-run --world-size 8); fi
exec "${LAUNCH[@]}" "${MODEL[@]}" "${LAYOUT[@]}" "${DATA[@]}" "${EVAL[@]}" "${LOSS[@]}" "${OPTIMIZER[@]}" \
    "${BATCHES[@]}" "${RUN[@]}" "$@"
