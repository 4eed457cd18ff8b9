#!/usr/bin/env bash
# What step_h200.txt holds, on one GPU: training step, log-probabilities, rollout, memory, whole steps beside TRL.
#
#     bash benchmarks/one_gpu.sh /tmp/one [part ...]
#
# Parts, by default all: step logprobs rollout memory estimate trl spread hf. One log a command in OUT; what was measured
# is printed; the exit status is 1 where a command failed. Half of step wants transformer-engine, trl and spread want trl
# 1.16. SMALL=1: a tiny model, for a look without a GPU, where those fail.
set -uo pipefail
ALL="step logprobs rollout memory estimate trl spread hf"
: "${1:?"usage: one_gpu.sh OUT [part ...], parts: $ALL"}"
OUT=$(realpath -m "$1")
shift
PARTS=${*:-$ALL}
for part in $PARTS; do
  [[ " $ALL " == *" $part "* ]] || { echo "one_gpu.sh: $part is no part of: $ALL" >&2; exit 2; }
done
cd "$(dirname "${BASH_SOURCE[0]}")/.."
mkdir -p "$OUT"
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
PYTHON=${PYTHON:-python}
TOKENIZER=${TOKENIZER:-models/SmolLM2-135M-Instruct}

# Qwen2.5-1.5B's shape; a training step of 4 x 4096 tokens; 64 prompts x 8 samples of 256 + 512 tokens
SHAPE=() LENGTH=4096 STEP_TOKENS=16384 TOKENS=(--tokens 16384 --vocab 151936 --hidden 1536) CHUNKS="1024 2048" CACHE=16
BATCH=(--rollout-batch-size 64 --n-samples-per-prompt 8 --max-tokens-per-micro-batch) LONG=24576 REPEATS=10
PPO=(--rollout-batch-size 32 --n-samples-per-prompt 4 --max-response-length 256 --kv-cache-gb 8)
if [[ ${SMALL:-0} == 1 ]]; then
  SHAPE=(hidden_size=128 intermediate_size=256 num_hidden_layers=2 num_attention_heads=4 num_key_value_heads=2 vocab_size=49152)
  LENGTH=64 STEP_TOKENS=256 TOKENS=(--tokens 64 --vocab 512 --hidden 32) CHUNKS="16 32" CACHE=0.1 REPEATS=1 LONG=256
  BATCH=(--rollout-batch-size 2 --n-samples-per-prompt 2 --max-prompt-length 16 --max-response-length 16
    --vllm-args enforce_eager=true --max-tokens-per-micro-batch)
  PPO=(--rollout-batch-size 4 --n-samples-per-prompt 2 --max-response-length 16 --kv-cache-gb 0.1
    --vllm-args enforce_eager=true)
fi

failed=0
log() { # name, command: its lines of results, and how it ended
  local log=$OUT/$1.log status
  shift
  "$PYTHON" "$@" >"$log" 2>&1
  status=$?
  echo "== $(basename "$log" .log): exit status $status; python $*"
  grep -E "^(rollout|bare|whole|trl) .*_s |measured result|^(plain|products|[0-9]+, )|rows differ|\[step\]|max_memory_alloc|error: " "$log"
  [[ $status == 0 ]] || { failed=1; tail -n 3 "$log"; }
}

for model in "qwen2.5-1.5b-untied q15u" "qwen2.5-1.5b q15"; do
  read -r shape name <<<"$model"
  [[ -e $OUT/$name ]] || log "$name" tools/random_model.py "$shape" "${SHAPE[@]}" --out "$OUT/$name" --tokenizer "$TOKENIZER"
  [[ $failed == 0 ]] || exit 1
done
BENCH=(tools/bench_step.py) TIED=(--hf-model "$OUT/q15" --output-dir "$OUT/bench")
MEMORY=(--hf-model "$OUT/q15" --train-data examples/data/topics.jsonl --reward length --max-prompt-length 64 --kl-coef 0.01
  --no-save-hf --max-tokens-per-micro-batch $STEP_TOKENS "${PPO[@]}")
OFFLOAD=(--offload-optimizer --offload-gradients --offload-reference --offload-critic)

step() {
  local common=(update --hf-model "$OUT/q15u" --sequences 4 --length $LENGTH --max-tokens-per-micro-batch $STEP_TOKENS
    --repeats $REPEATS) chunk
  for chunk in $CHUNKS; do
    log "step_te_$chunk" "${BENCH[@]}" "${common[@]}" --transformer-impl transformer_engine --logprob-chunk-tokens "$chunk"
    log "step_local_$chunk" "${BENCH[@]}" "${common[@]}" --logprob-chunk-tokens "$chunk"
  done
}
logprobs() { log logprobs tools/bench_logprobs.py "${TOKENS[@]}" --chunk-tokens $CHUNKS; }
rollout() {
  log rollout "${BENCH[@]}" bare rollout "${TIED[@]}" "${BATCH[@]}" $STEP_TOKENS --kv-cache-gb $CACHE --repeats 2
}
memory() {
  log memory_copy train_ppo.py "${MEMORY[@]}" --output-dir "$OUT/copy" --train-iters 3 --rollout-weights copy
  log memory_offloaded train_ppo.py "${MEMORY[@]}" --output-dir "$OUT/offloaded" --train-iters 20 "${OFFLOAD[@]}"
}
estimate() { # 12,720 tokens: micro-batches as these runs fill them
  local tool=(tools/estimate_memory.py --gpu-memory-gb 150.1 ppo --world-size 1)
  log estimate_copy "${tool[@]}" "${MEMORY[@]}" --rollout-weights copy --max-tokens-per-micro-batch 12720
  log estimate_offloaded "${tool[@]}" "${MEMORY[@]}" "${OFFLOAD[@]}" --max-tokens-per-micro-batch 12720
  log estimate_whole "${tool[@]}" "${TIED[@]}" --train-data x --reward length --advantage-estimator grpo \
    --max-prompt-length 256 --max-response-length 512 "${BATCH[@]}" $LONG --kv-cache-gb $CACHE
}
beside_trl() { # name, flags
  local name=$1
  shift
  printf 'def seven(prompt: str, response: str, row: dict) -> float:\n    return float(len(response) %% 7)\n' >"$OUT/rules.py"
  log "$name" "${BENCH[@]}" whole trl "${TIED[@]}" "${BATCH[@]}" $LONG --old-logprobs update --kv-cache-gb $CACHE --repeats 2 \
    --reward "$OUT/rules.py:seven" "$@"
}
trl() { beside_trl trl; }
spread() { beside_trl spread --spread 10; }
hf() {
  log hf "${BENCH[@]}" rollout "${TIED[@]}" "${BATCH[@]}" $STEP_TOKENS --rollout-batch-size 8 --rollout-backend hf --repeats 1
}

for part in $PARTS; do "$part"; done
exit $failed
