"""The shortened walk of vLLM's scheduler against the whole one: a real engine, shared prompts, too few blocks."""

import sys
from pathlib import Path
from typing import Any

import launch
import torch
from models.tiny import tiny_model

PROMPTS = [list(range(5, 45))] * 4 + [list(range(60, 60 + n)) for n in (1, 31, 32, 33)]
BLOCKS = 9  # of 32 tokens: 8 requests of up to 140 tokens want more


def run(folder: str, shortened: bool) -> dict[str, Any]:
    """Tokens, what the block tables held after each step, and how often vLLM's own functions were asked."""
    from vllm import LLM, SamplingParams

    from megatron_rl.rollout.scheduling import shorten_walk

    block_bytes = 32 * 3 * 2 * 2 * 32 * 4  # tokens, layers, keys and values, heads, of 32 numbers, in float32
    llm = LLM(
        model=folder,
        dtype="float32",
        max_model_len=160,
        block_size=32,
        skip_tokenizer_init=True,
        enforce_eager=True,
        kv_cache_memory_bytes=BLOCKS * block_bytes,
        max_num_batched_tokens=64,  # a prompt comes in chunks
    )
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    manager = scheduler.kv_cache_manager
    group = manager.coordinator.single_type_managers[0]
    seen: dict[str, Any] = {"tables": [], "own": 0, "preempted": 0}

    def counted(name: str) -> None:
        own = getattr(manager, name)

        def count(*args: Any, **kwargs: Any) -> Any:
            seen["own"] += 1
            return own(*args, **kwargs)

        setattr(manager, name, count)

    counted("allocate_slots")
    counted("cache_blocks")
    if shortened:
        assert shorten_walk(llm)
    update = scheduler.update_from_output

    def update_and_look(asked: Any, got: Any) -> Any:
        outputs = update(asked, got)
        for request in scheduler.running:  # as vLLM's asynchronous scheduler does, which the CPU has not
            manager.cache_blocks(request, request.num_computed_tokens)
        seen["preempted"] += len(asked.preempted_req_ids or ())
        tables = {
            name.split("-")[0]: ([block.block_id for block in blocks], group.num_cached_block.get(name))
            for name, blocks in group.req_to_blocks.items()
        }
        pool = group.block_pool
        seen["tables"].append((tables, pool.get_num_free_blocks(), len(pool.cached_block_hash_to_block)))
        return outputs

    scheduler.update_from_output = update_and_look
    params = [SamplingParams(max_tokens=90 + i, ignore_eos=True, temperature=0) for i in range(len(PROMPTS))]
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], params, use_tqdm=False)
    seen["tokens"] = [list(output.outputs[0].token_ids) for output in outputs]
    return seen


def test_walk_is_only_shorter(tmp_path: Path):
    """Tokens, block tables, free and cached blocks are the same after every step, with a quarter of the calls."""
    tiny_model(tmp_path / "qwen2", "qwen2")
    code = "import sys, torch; from rollout.test_scheduling import run\n"
    code += "torch.save(run(sys.argv[1], sys.argv[2] == '1'), sys.argv[3])"
    env = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR"}
    seen = []
    for shortened in (0, 1):
        out = tmp_path / f"{shortened}.pt"
        launch.check(launch.run(sys.executable, "-c", code, tmp_path / "qwen2", shortened, out, env=env, timeout=200))
        seen.append(torch.load(out))
    whole, short = seen
    assert whole["preempted"] > 0
    assert short["tokens"] == whole["tokens"]
    assert short["tables"] == whole["tables"]
    assert short["own"] < whole["own"] / 4
