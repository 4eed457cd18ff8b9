"""Log-probabilities of the sampled tokens, taken on the device while vLLM samples: one buffer, copied once.

vLLM's own way (logprobs=0) makes host objects for every token and waits for the device in every step, which on a GPU
costs more than half the speed. Here each step launches one kernel that writes a column of a tensor. The request of a
row is known by its seed, which vLLM's V2 model runner keeps on the device.

Shape suffixes: N requests of one generate call, L most tokens of a response, S rows of one engine step, V vocabulary.
"""

import inspect
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from vllm import LLM

BLOCK, REQUESTS = 8192, 1024  # entries of the vocabulary, and requests, that a program looks at together


class LogprobCapture:
    """Stands behind the sampler's `sample` method; it records only between begin() and end()."""

    def __init__(self, sample: Callable[..., tuple[Tensor, Tensor]], states: Any) -> None:
        """`sample` returns tokens and the logits they are drawn from, `states.seeds.gpu` has each slot's seed."""
        self.sample, self._states = sample, states
        names = list(inspect.signature(sample).parameters)
        self._slot_at, self._position_at = names.index("expanded_idx_mapping"), names.index("pos")
        self._logprobs_NL: Tensor | None = None

    def begin(self, seeds: Sequence[int], prompt_lengths: Sequence[int], max_tokens: int) -> None:
        """Seeds must differ: they name the requests."""
        assert len(set(seeds)) == len(seeds), "every request has a seed of its own"
        device = self._states.seeds.gpu.device
        self._seed_N = torch.tensor(seeds, dtype=torch.int64, device=device)
        self._prompt_N = torch.tensor(prompt_lengths, device=device)
        self._logprobs_NL = torch.full((len(seeds), max_tokens), torch.nan, device=device)

    def end(self, lengths: Sequence[int]) -> list[tuple[float, ...]]:
        """Of the i-th seed's response as many log-probabilities as it has tokens.

        RuntimeError where vLLM sampled tokens by another way than the sampler's method (speculative decoding does).
        """
        assert self._logprobs_NL is not None, "begin() comes first"
        rows, self._logprobs_NL = self._logprobs_NL.tolist(), None
        found = [tuple(row[:length]) for row, length in zip(rows, lengths, strict=True)]
        if missing := sum(value != value for row in found for value in row):
            raise RuntimeError(
                f"{missing} tokens came without log-probability: what in --vllm-args samples otherwise?"
            )
        return found

    def sample_and_record(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """In the place of `sample`. Nothing here waits for the device, and a step launches one kernel.

        Of a token that is sampled again (after a preemption) the last counts.
        """
        sampled_S, logits_SV = self.sample(*args, **kwargs)
        if self._logprobs_NL is not None:
            from megatron_rl.rollout.capture_kernel import record

            assert logits_SV.stride(1) == 1 and len(sampled_S) == len(logits_SV), "a row of logits for each token"
            record[len(sampled_S),](
                logits_SV,
                logits_SV.stride(0),
                sampled_S,
                args[self._slot_at],
                args[self._position_at],
                self._states.seeds.gpu,  # not one tensor: vLLM has several in turn
                self._seed_N,
                self._prompt_N,
                self._logprobs_NL,
                *self._logprobs_NL.shape,
                logits_SV.shape[1],
                BLOCK=BLOCK,
                REQUESTS=REQUESTS,
                num_warps=8,
            )
        return sampled_S, logits_SV


def capture_of(llm: "LLM") -> LogprobCapture | None:
    """None where the engine has vLLM's older model runner (the CPU's), whose log-probabilities are asked of vLLM."""
    runner = llm.llm_engine.model_executor.driver_worker.worker.model_runner
    if not runner.vllm_config.use_v2_model_runner:
        return None
    capture = LogprobCapture(runner.sampler.sample, runner.sampler.sampling_states)
    runner.sampler.sample = capture.sample_and_record
    return capture
