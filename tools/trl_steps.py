"""GRPO steps by TRL's GRPOTrainer with its colocated vLLM: what bench_step.py measures ours against."""

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from megatron_rl import platform


def steps(args: Any, prompts: str) -> tuple[float, float, int]:
    """(seconds of the fastest step after the first, seconds of its generation, its response tokens).

    Weights are bfloat16 without float32 masters, which costs TRL the least time and memory.
    """
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer
    from vllm import LLM

    rows = [json.loads(line) for line in Path(prompts).read_text(encoding="utf-8").splitlines()]
    samples = args.rollout_batch_size * args.n_samples_per_prompt
    config = GRPOConfig(
        output_dir=f"{args.output_dir}/trl",
        use_vllm=True,
        vllm_mode="colocate",
        vllm_gpu_memory_utilization=0.3,
        vllm_max_model_length=args.max_prompt_length + args.max_response_length,
        max_completion_length=args.max_response_length,
        num_generations=args.n_samples_per_prompt,
        per_device_train_batch_size=args.trl_micro_batch,
        gradient_accumulation_steps=samples // args.trl_micro_batch,
        max_steps=args.repeats + 1,
        learning_rate=args.lr,
        beta=0.0,
        bf16=True,
        gradient_checkpointing=args.recompute_granularity == "full",
        logging_steps=1,
        report_to="none",
        save_strategy="no",
    )
    seconds: list[float] = []
    rollouts: list[tuple[float, int]] = []
    generate = LLM.generate

    def timed_generate(*given: Any, **named: Any) -> Any:
        started = time.perf_counter()
        outputs = generate(*given, **named)
        rollouts.append((time.perf_counter() - started, sum(len(o.outputs[0].token_ids) for o in outputs)))
        return outputs

    class Clock(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            platform.synchronize()
            seconds.append(-time.perf_counter())

        def on_step_end(self, *_: Any, **__: Any) -> None:
            platform.synchronize()
            seconds[-1] += time.perf_counter()

    def reward(completions: Sequence[str], **_: Any) -> list[float]:
        return [float(len(text) % 7) for text in completions]

    LLM.generate = timed_generate
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(args.hf_model, dtype=torch.bfloat16, attn_implementation="sdpa"),
        reward_funcs=reward,
        args=config,
        train_dataset=Dataset.from_list(rows),
        processing_class=AutoTokenizer.from_pretrained(args.hf_model),
        callbacks=[Clock()],
    )
    trainer.train()
    best = min(range(1, len(seconds)), key=lambda i: seconds[i])
    return seconds[best], *rollouts[best]
