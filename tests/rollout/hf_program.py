"""Run under torchrun by test_hf_backend.py: vLLM's engine and transformers on the same weights, asked for the same."""

import sys
from typing import Any

import torch
from rollout.engine_program import PROMPTS, cut, message_of, values

from megatron_rl.initialize import Topology, initialize
from megatron_rl.models.config import dims, read_hf_config
from megatron_rl.rollout.engine import Engine, EngineOptions, GenerateRequest, SamplingOptions, TrainedWeights
from megatron_rl.rollout.hf_backend import HFEngine
from megatron_rl.weights.layouts import hf_shapes, megatron_shards, train_layout

REQUESTS = [GenerateRequest(prompt, 100 + i) for i, prompt in enumerate((*PROMPTS, (7, 8, 9), PROMPTS[1][:-1] + (3,)))]
GREEDY = SamplingOptions(max_tokens=16, temperature=0.0)
DRAWN = SamplingOptions(max_tokens=12, temperature=0.7)


def with_weights(folder: str, topology: Topology, kind: type) -> Any:
    """A synced engine of the kind; its weights are those of step 1, cut for one rank."""
    sizes = dims(read_hf_config(folder))
    shards, of_rank = megatron_shards(sizes, train_layout(sizes, 1, 1, 1, 1), [(0, 0, 0)])
    tensors = cut(shards[0], values(folder, 1), torch.float32)
    vllm_args = {"enforce_eager": True, "max_num_seqs": 16}
    options = EngineOptions(128, torch.float32, kv_cache_bytes=1 << 24, with_tokenizer=True, vllm_args=vllm_args)
    engine = kind(folder, options, topology, TrainedWeights(tensors, shards, of_rank, hf_shapes(sizes)))
    engine.refused = message_of(lambda: engine.generate(REQUESTS, GREEDY))
    engine.sync()
    engine.verify()
    return engine


def compare(folder: str, topology: Topology) -> dict[str, Any]:
    """What both answer to every way of ending; then what transformers alone draws and refuses."""
    engines = {kind.__name__: with_weights(folder, topology, kind) for kind in (Engine, HFEngine)}
    hf = engines["HFEngine"]
    first = hf.generate(REQUESTS, GREEDY)[0].token_ids
    text = hf.tokenizer.decode(list(first[4:6]))
    asked = {
        "greedy": GREEDY,
        "stop text": SamplingOptions(16, temperature=0.0, stop=(text, "never said")),
        "stop text, min": SamplingOptions(16, min_tokens=6, temperature=0.0, stop=(text,)),
        "stop token": SamplingOptions(16, temperature=0.0, stop_token_ids=(first[2],)),
        "stop token, min": SamplingOptions(16, min_tokens=5, temperature=0.0, stop_token_ids=(first[2],)),
        "no eos": SamplingOptions(16, temperature=0.0, ignore_eos=True, logprobs=False),
    }
    seen: dict[str, Any] = {name: engine.refused for name, engine in engines.items()}
    seen["asked"] = {name: [e.generate(REQUESTS, how) for e in engines.values()] for name, how in asked.items()}
    seen["drawn"], seen["again"] = hf.generate(REQUESTS, DRAWN), hf.generate(REQUESTS[1:2], DRAWN)
    seen["top_k"] = hf.generate(REQUESTS, SamplingOptions(12, top_k=1))
    seen["top_p"] = hf.generate(REQUESTS, SamplingOptions(12, top_p=1e-6))
    seen["nothing"] = hf.generate([], DRAWN)
    hf.sleep()
    seen["asleep"] = message_of(lambda: hf.generate(REQUESTS, DRAWN)), message_of(hf.wake)
    hf.sync()
    hf.memory["model.norm.weight"][3] += 1
    seen["corrupt"] = message_of(hf.verify)
    return seen


def main() -> None:
    out, *folders = sys.argv[1:]
    topology = initialize(1, 1, 1, 1)
    torch.save({folder: compare(folder, topology) for folder in folders}, out)


if __name__ == "__main__":
    main()
