"""How samples are dealt to replicas, seeded and brought together."""

from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_rl.batch import Response
from megatron_rl.rollout.collect import _Packed, deal, sample_seed

FEW = st.integers(1, 9)


@given(FEW, FEW, FEW)
def test_every_sample_is_dealt_once(prompts: int, n: int, replicas: int):
    """Each sample goes to one replica; loads differ by one prompt at most, and no replica is idle needlessly."""
    dealt = deal(prompts, n, replicas)
    assert len(dealt) == replicas
    assert Counter(i for part in dealt for i in part) == Counter(range(prompts * n))
    loads = [len(part) for part in dealt]
    assert max(loads) - min(loads) <= (n if prompts >= replicas else 1)


@given(st.integers(2, 9), FEW, FEW)
def test_samples_of_a_prompt_stay_together_where_they_can(prompts: int, n: int, replicas: int):
    """With at least as many prompts as replicas a prompt's samples share one, and with it its cached prefix."""
    if prompts < replicas:
        return
    for part in deal(prompts, n, replicas):
        assert all(part.count(i) and {i // n * n + k for k in range(n)} <= set(part) for i in part)


def test_seeds_differ_and_repeat():
    """Every sample of every step and run has its own seed, within vLLM's range, and the same one again."""
    seeds = [sample_seed(run, step, i) for run in (1, 2) for step in (1, 2, 3) for i in range(50)]
    assert len(set(seeds)) == len(seeds) and all(0 <= seed < 2**62 for seed in seeds)
    assert sample_seed(1, 2, 3) == sample_seed(1, 2, 3)


@pytest.mark.parametrize("logprobs", [True, False])
def test_packing_keeps_responses(logprobs: bool):
    """Flat tensors carry every field of every response, log-probabilities to float32, and nothing of none."""
    sizes = (3, 1, 7)
    responses = [
        Response(tuple(range(n)), tuple(-0.1 * (i + 1) for i in range(n)) if logprobs else (), n == 7, 5, 0.25 * n)
        for n in sizes
    ]
    packed = _Packed.of([4, 0, 9], responses)
    if logprobs:
        found = packed.responses()
        assert list(found) == [4, 0, 9]
        for response, back in zip(responses, found.values(), strict=True):
            assert (back.token_ids, back.truncated, back.weight_version) == (response.token_ids, response.truncated, 5)
            assert back.seconds == response.seconds
            assert torch.tensor(back.logprobs).equal(torch.tensor(response.logprobs))
    else:
        assert all(back.logprobs == () for back in packed.responses().values())
    assert _Packed.of([], []).responses() == {}
