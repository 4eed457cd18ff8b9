"""Log-probabilities of the sampled tokens, taken on the device while vLLM samples: one buffer, copied once.

vLLM's own way (logprobs=0) makes host objects for every token and waits for the device in every step, which on a GPU
costs more than half the speed. Here each step writes a column of a tensor. The request of a row is known by its seed,
which vLLM's V2 model runner keeps on the device.

Shape suffixes: N requests of one generate call, L most tokens of a response, S rows of one engine step.
"""

import inspect
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from vllm import LLM


class LogprobCapture:
    """Stands behind the sampler's `sample` method; it records only between begin() and end()."""

    def __init__(self, sampler: Any) -> None:
        from vllm.v1.worker.gpu.sample.logprob import compute_token_logprobs

        self._states, self._sample = sampler.sampling_states, sampler.sample
        self._compute = compute_token_logprobs
        names = list(inspect.signature(sampler.sample).parameters)
        self._slot_at, self._position_at = names.index("expanded_idx_mapping"), names.index("pos")
        self._logprobs_NL1: Tensor | None = None
        sampler.sample = self._sample_and_record

    def begin(self, seeds: Sequence[int], prompt_lengths: Sequence[int], max_tokens: int) -> None:
        """Seeds must differ: they name the requests."""
        assert len(set(seeds)) == len(seeds), "every request has a seed of its own"
        device = self._states.seeds.gpu.device
        self._seeds_N, self._request_N = torch.tensor(seeds, dtype=torch.int64, device=device).sort()
        self._prompts_N = torch.tensor(prompt_lengths, device=device)
        # the last column takes what is no response's token: chunks of a prompt, a step ahead of a response that ended
        self._logprobs_NL1 = torch.full((len(seeds), max_tokens + 1), torch.nan, device=device)

    def end(self, lengths: Sequence[int]) -> list[tuple[float, ...]]:
        """Of the i-th seed's response as many log-probabilities as it has tokens.

        RuntimeError where vLLM sampled tokens by another way than the sampler's method (speculative decoding does).
        """
        assert self._logprobs_NL1 is not None, "begin() comes first"
        rows, self._logprobs_NL1 = self._logprobs_NL1.tolist(), None
        found = [tuple(row[:length]) for row, length in zip(rows, lengths, strict=True)]
        if missing := sum(value != value for row in found for value in row):
            raise RuntimeError(
                f"{missing} tokens came without log-probability: what in --vllm-args samples otherwise?"
            )
        return found

    def _sample_and_record(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        sampled_S, logits_SV = self._sample(*args, **kwargs)
        if self._logprobs_NL1 is not None:
            self._record(logits_SV, sampled_S, args[self._slot_at], args[self._position_at])
        return sampled_S, logits_SV

    def _record(self, logits_SV: Tensor, sampled_S: Tensor, slots_S: Tensor, positions_S: Tensor) -> None:
        """Nothing here waits for the device. Of a token that is sampled again (after a preemption) the last counts."""
        logprobs_S = self._compute(logits_SV, sampled_S.view(-1, 1)).view(-1)
        found_S = torch.searchsorted(self._seeds_N, self._states.seeds.gpu[slots_S])
        rows_S = self._request_N[found_S]
        last = self._logprobs_NL1.shape[1] - 1
        columns_S = positions_S + 1 - self._prompts_N[rows_S]
        columns_S = torch.where(columns_S < 0, last, columns_S.clamp(max=last))
        self._logprobs_NL1.index_put_((rows_S, columns_S), logprobs_S)


def capture_of(llm: "LLM") -> LogprobCapture | None:
    """None where the engine has vLLM's older model runner (the CPU's), whose log-probabilities are asked of vLLM."""
    runner = llm.llm_engine.model_executor.driver_worker.worker.model_runner
    if not runner.vllm_config.use_v2_model_runner:
        return None
    return LogprobCapture(runner.sampler)
