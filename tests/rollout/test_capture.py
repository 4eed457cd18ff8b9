"""The capture of log-probabilities on steps as vLLM's sampler makes them: by Triton's interpreter, and on CUDA."""

import os
import sys
from types import SimpleNamespace

import launch
import pytest
import torch

SEEDS, PROMPTS, LENGTHS = [70, 2**62 - 1, 5], [4, 2, 3], [3, 5, 2]


def steps(device: str, vocab: int) -> list[tuple[torch.Tensor, ...]]:
    """(tokens, logits, slots, positions): what the rows of each step are; a slot is where vLLM keeps a request.

    Request 0 has slot 6, request 1 slot 0 and request 2 slot 3; slot 2 is somebody else's.
    """
    generator, made = torch.Generator().manual_seed(0), []
    for rows in (
        [(0, 1), (6, 1)],  # the whole prompt of request 1; a chunk of request 0's, which is no response's token
        [(0, 2), (6, 3), (3, 2)],
        [(3, 3), (0, 3), (6, 4), (2, 5)],
        [(6, 5), (0, 4), (3, 4)],  # request 2 has ended: a step ahead
        [(0, 4), (6, 6), (-1, 0)],  # request 1's token again, after a preemption; request 0 a step ahead; padding
        [(0, 5), (0, 6)],
    ):
        logits = 3 * torch.randn(len(rows), vocab, generator=generator)
        logits[0, : vocab // 2] = -torch.inf  # what top-k or top-p leaves
        tokens = torch.multinomial(logits.softmax(-1), 1, generator=generator)[:, 0]
        slots, positions = torch.tensor(rows).unbind(1)
        made.append(tuple(x.to(device) for x in (tokens, logits, slots.int(), positions.contiguous())))
    return made


def compare(device: str, vocab: int) -> None:
    """What end() gives is log softmax of the logits at the tokens, in the order of the responses."""
    from megatron_rl.rollout.capture import LogprobCapture

    seeds = torch.zeros(8, dtype=torch.int64)
    seeds[torch.tensor([6, 0, 3, 2])] = torch.tensor([*SEEDS, 99])
    made = steps(device, vocab)

    def sample(step: int, expanded_idx_mapping: torch.Tensor, pos: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return made[step][:2]

    capture = LogprobCapture(sample, SimpleNamespace(seeds=SimpleNamespace(gpu=seeds.to(device))))
    capture.sample_and_record(0, *made[0][2:])  # outside of a call: not recorded
    capture.begin(SEEDS, PROMPTS, max_tokens=6)
    for step, (_, _, slots, positions) in enumerate(made):
        capture.sample_and_record(step, slots, positions)
    found = capture.end(LENGTHS)

    def of(step: int, row: int) -> float:
        tokens, logits = made[step][:2]
        return logits[row].double().log_softmax(-1)[tokens[row]].item()

    expected = [
        [of(1, 1), of(2, 2), of(3, 0)],
        [of(0, 0), of(1, 0), of(2, 1), of(4, 0), of(5, 0)],
        [of(1, 2), of(2, 0)],
    ]
    for values, wanted in zip(found, expected, strict=True):
        assert values == pytest.approx(wanted, abs=1e-5)
    capture.begin(SEEDS, PROMPTS, max_tokens=6)
    capture.sample_and_record(0, *made[0][2:])
    with pytest.raises(RuntimeError, match="1 tokens came without log-probability"):
        capture.end([0, 2, 0])


def test_capture():
    """Rows find their request and place, several blocks of the vocabulary and of the requests, by the interpreter."""
    pytest.importorskip("triton")
    code = "from rollout import test_capture as t; from megatron_rl.rollout import capture\n"
    code += "capture.BLOCK, capture.REQUESTS = 16, 2; t.compare('cpu', 50); print('compared')"
    out = launch.check(launch.run(sys.executable, "-c", code, env={"TRITON_INTERPRET": "1"}))
    assert out == "compared\n"


@pytest.mark.gpu
def test_capture_on_cuda():
    """The compiled kernel gives the same."""
    assert "TRITON_INTERPRET" not in os.environ
    compare("cuda", 20_000)
