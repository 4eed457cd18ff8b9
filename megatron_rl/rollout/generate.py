"""Requests and responses of the engine: what is asked of vLLM and what of its answer is kept."""

import hashlib
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from megatron_rl.batch import Response

if TYPE_CHECKING:
    from vllm import LLM

    from megatron_rl.rollout.capture import LogprobCapture


@dataclass(frozen=True)
class GenerateRequest:
    """One response to one prompt."""

    token_ids: tuple[int, ...]  # of the prompt
    seed: int  # equal on the ranks of a replica, another for every sample


@dataclass(frozen=True)
class SamplingOptions:
    """How responses are drawn, equal for all requests of a call."""

    max_tokens: int
    min_tokens: int = 0
    temperature: float = 1.0  # 0 takes the likeliest token
    top_p: float = 1.0
    top_k: int = 0  # 0 keeps all
    stop_token_ids: tuple[int, ...] = ()  # besides the model's end-of-sequence tokens
    stop: tuple[str, ...] = ()  # strings that end a response; need an engine built with a tokenizer
    ignore_eos: bool = False
    logprobs: bool = True  # of the sampled tokens, after temperature


def requests_hash(requests: Sequence[GenerateRequest], options: SamplingOptions) -> int:
    """Equal for equal requests in equal order, on every rank."""
    digest = hashlib.blake2b(repr(options).encode(), digest_size=8)
    for request in requests:
        digest.update(repr(request).encode())
    return int.from_bytes(digest.digest(), "little") >> 1


def check_requests(
    requests: Sequence[GenerateRequest], options: SamplingOptions, max_model_len: int, vocab_size: int
) -> None:
    """Raises ValueError for what vLLM would stop at midway: one bad prompt aborts its whole call."""
    if options.max_tokens < 1:
        raise ValueError(f"responses of at most {options.max_tokens} tokens: --max-response-length is at least 1")
    if options.min_tokens > options.max_tokens:
        raise ValueError(f"responses of {options.min_tokens} to {options.max_tokens} tokens: no length is in between")
    if options.temperature < 0:
        raise ValueError(f"--temperature {options.temperature} is negative")
    for number, request in enumerate(requests):
        length = len(request.token_ids)
        if length == 0:
            raise ValueError(f"prompt {number} is empty")
        if length + options.max_tokens > max_model_len:
            raise ValueError(
                f"prompt {number} has {length} tokens, and with a response of up to {options.max_tokens} it exceeds "
                f"the engine's {max_model_len}: lower --max-prompt-length or --max-response-length"
            )
        if not 0 <= min(request.token_ids) <= max(request.token_ids) < vocab_size:
            raise ValueError(f"prompt {number} has a token outside of the model's vocabulary of {vocab_size}")


def generate(
    llm: "LLM",
    requests: Sequence[GenerateRequest],
    options: SamplingOptions,
    eos_token_ids: tuple[int, ...],
    weight_version: int,
    capture: "LogprobCapture | None",
    progress: Any = False,
) -> list[Response]:
    """One response for each request, in order. With a `capture` the log-probabilities come from it, else from vLLM."""
    from vllm import SamplingParams

    asks_vllm = options.logprobs and capture is None
    stop_ids = options.stop_token_ids + (() if options.ignore_eos else eos_token_ids)
    params = [
        SamplingParams(
            max_tokens=options.max_tokens,
            min_tokens=options.min_tokens,
            temperature=options.temperature,
            top_p=options.top_p,
            top_k=options.top_k,
            seed=request.seed,
            stop=list(options.stop),
            stop_token_ids=list(stop_ids),
            ignore_eos=options.ignore_eos,
            logprobs=0 if asks_vllm else None,  # 0: of the sampled token alone
            flat_logprobs=asks_vllm,
            detokenize=bool(options.stop),
        )
        for request in requests
    ]
    prompts = [{"prompt_token_ids": list(request.token_ids)} for request in requests]
    captures = capture is not None and options.logprobs and bool(requests)
    if captures:
        lengths = [len(request.token_ids) for request in requests]
        capture.begin([request.seed for request in requests], lengths, options.max_tokens)
    with finish_times(llm) as seconds:
        outputs = llm.generate(prompts, params, use_tqdm=progress) if prompts else []
    completions = [output.outputs[0] for output in outputs]
    if captures:
        logprobs = capture.end([len(c.token_ids) for c in completions])
    elif asks_vllm:
        logprobs = [tuple(c.logprobs.logprobs) for c in completions]
    else:
        logprobs = [()] * len(completions)
    ended = [seconds[output.request_id] for output in outputs]
    found = zip(completions, logprobs, ended, strict=True)
    return [_response(c, values, options.logprobs, weight_version, at) for c, values, at in found]


@contextmanager
def finish_times(llm: "LLM") -> Iterator[dict[str, float]]:
    """Seconds into the block at which each request was complete, by its id."""
    engine, started, seconds = llm.llm_engine, time.perf_counter(), {}
    step = engine.step

    def timed_step() -> Any:
        outputs = step()
        now = time.perf_counter() - started
        seconds.update({output.request_id: now for output in outputs if output.finished})
        return outputs

    engine.step = timed_step
    try:
        yield seconds
    finally:
        engine.step = step


def _response(
    completion: Any, logprobs: tuple[float, ...], with_logprobs: bool, weight_version: int, seconds: float
) -> Response:
    token_ids = tuple(completion.token_ids)
    assert token_ids, f"vLLM gave no token (it finished with {completion.finish_reason!r})"
    assert not with_logprobs or len(logprobs) == len(token_ids), "one log-probability for each sampled token"
    return Response(token_ids, logprobs, completion.finish_reason == "length", weight_version, seconds)
