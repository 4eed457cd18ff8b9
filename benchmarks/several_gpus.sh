#!/usr/bin/env bash
# Weight sync, training step, PPO and a failing rank on 2 or 4 GPUs of one host; the results go to OUT, one log a run.
#
#     python tools/random_model.py qwen2.5-7b --out /tmp/q7 --tokenizer models/SmolLM2-135M-Instruct
#     bash benchmarks/several_gpus.sh 2 /tmp/q7 /tmp/several [further flags of the engine and the batches]
#
# Without GPUs it runs too, on a small model: the ratios there are those of the machine's cores.
set -uo pipefail
GPUS=$1 MODEL=$2 OUT=$3
shift 3
cd "$(dirname "${BASH_SOURCE[0]}")/.."
mkdir -p "$OUT"
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
PYTHON=${PYTHON:-python}

declare -A FLAGS=(
  [TP2]="--tensor-model-parallel-size 2 --sequence-parallel" [PP2]="--pipeline-model-parallel-size 2" [DP2]="" [DP4]=""
  [TP4]="--tensor-model-parallel-size 4 --sequence-parallel" [PP4]="--pipeline-model-parallel-size 4"
  [TP2PP2]="--tensor-model-parallel-size 2 --sequence-parallel --pipeline-model-parallel-size 2"
  [TP2DP2]="--tensor-model-parallel-size 2 --sequence-parallel"
)
case $GPUS in
  2) SYNCS="TP2 PP2 DP2" STEPS="TP2 PP2 DP2" ROLLOUTS="1 2" ;;
  4) SYNCS="TP2PP2 TP4 TP2DP2 PP4" STEPS="TP4 TP2PP2 DP4" ROLLOUTS="1 2 4" ;;
  *) echo "several_gpus.sh: $GPUS GPUs: 2 or 4" >&2; exit 2 ;;
esac

ranks() { # number, name of the log, command: its last lines, and how it ended
  local count=$1 log=$OUT/$2.log status
  shift 2
  "$PYTHON" -m torch.distributed.run --standalone --nproc_per_node "$count" "$@" >"$log" 2>&1
  status=$?
  echo "== $(basename "$log" .log): exit status $status"
  grep -E "^(ours|whole|Needed|Sending|  after|measured result|\[(sync|rollout|logprobs|critic|policy|step)\])|[a-z_]+\.py: |error: " "$log"
}

for layout in $SYNCS; do
  for tp in $ROLLOUTS; do
    ranks "$GPUS" "sync_${layout}_to_TP$tp" tools/bench_reshard.py --hf-model "$MODEL" ${FLAGS[$layout]} \
      --rollout-tensor-parallel-size "$tp" --no-disk --repeats 3 --steps 2 --max-tokens-per-micro-batch 4096 "$@"
  done
done

MICRO=(--sequences $((2 * GPUS)) --length "${LENGTH:-4096}" --max-tokens-per-micro-batch $((2 * ${LENGTH:-4096})))
ranks 1 step_alone tools/bench_step.py update --hf-model "$MODEL" --recompute-granularity full "${MICRO[@]}" "$@"
for layout in $STEPS; do
  ranks "$GPUS" "step_$layout" tools/bench_step.py update --hf-model "$MODEL" --recompute-granularity full ${FLAGS[$layout]} \
    "${MICRO[@]}" "$@"
done

cat >"$OUT/rules.py" <<'P'
import os
import time


def seven(prompt: str, response: str, row: dict) -> float:
    return float(len(response) % 7)


def fails(prompt: str, response: str, row: dict) -> float:
    if int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1:
        with open(__file__ + ".time", "w") as file:
            file.write(str(time.time()))
        raise RuntimeError("the last rank fails")
    return 0.0
P
PPO=(train_ppo.py --hf-model "$MODEL" --train-data examples/data/topics.jsonl --train-iters 3 --kl-coef 0.01
  --max-prompt-length 64 --max-response-length 128 --rollout-batch-size 16 --n-samples-per-prompt 4
  --max-tokens-per-micro-batch 8192 --recompute-granularity full --no-save-hf --no-progress
  --offload-optimizer --offload-gradients --offload-reference --offload-critic)
layout=${SYNCS%% *}
ranks "$GPUS" "ppo_$layout" "${PPO[@]}" ${FLAGS[$layout]} --reward "$OUT/rules.py:seven" --output-dir "$OUT/ppo" "$@"
ranks "$GPUS" "fails_$layout" "${PPO[@]}" ${FLAGS[$layout]} --reward "$OUT/rules.py:fails" --output-dir "$OUT/fails" "$@"
"$PYTHON" -c "import sys, time; print(f'all ranks were down {time.time() - float(open(sys.argv[1]).read()):.1f} s after the error')" \
  "$OUT/rules.py.time"
