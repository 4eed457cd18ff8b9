import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pytest import mark, raises

from megatron_rl.batch import Prompt, Response, Sample, batch_of, pack
from megatron_rl.data.packing import PackingOptions, plan_micro_batches


@settings(max_examples=200, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 100), min_size=1, max_size=60),
    dp_size=st.sampled_from([1, 2, 3, 8]),
    budget=st.integers(100, 300),
    most=st.sampled_from([None, 1, 3]),
)
def test_every_sequence_once_within_budget_and_equally_many_micro_batches(lengths, dp_size, budget, most):
    """Each sequence stands in one micro-batch, none exceeds a limit, and all ranks run equally many."""
    plan = plan_micro_batches(lengths, dp_size, PackingOptions(budget, most))
    assert len(plan) == dp_size and len({len(rank) for rank in plan}) == 1
    micros = [micro for rank in plan for micro in rank]
    assert sorted(i for micro in micros for i in micro) == list(range(len(lengths)))
    assert all(sum(lengths[i] for i in micro) <= budget for micro in micros)
    assert most is None or all(len(micro) <= most for micro in micros)
    assert plan == plan_micro_batches(lengths, dp_size, PackingOptions(budget, most))


@settings(max_examples=100, deadline=None)
@given(lengths=st.lists(st.integers(1, 40), min_size=2, max_size=40).filter(lambda x: len(x) % 2 == 0))
def test_units_stay_together(lengths):
    """The two sequences of a pair never leave their micro-batch."""
    units = [(i, i + 1) for i in range(0, len(lengths), 2)]
    for rank in plan_micro_batches(lengths, 2, PackingOptions(90), units):
        for micro in rank:
            assert all((i ^ 1) in micro for i in micro)


def test_uneven_load_is_balanced():
    """One 500-token sequence and eight of 20 on two ranks: equal counts, nothing lost."""
    plan = plan_micro_batches([500] + [20] * 8, 2, PackingOptions(500))
    assert plan == [[[0]], [[1, 2, 3, 4, 5, 6, 7, 8]]]


@mark.parametrize("quadratic", [0.0, 1e-4])
@mark.parametrize(("dp_size", "budget"), [(1, 16384), (2, 8192), (4, 16384), (8, 8192), (16, 4096)])
def test_spread_lengths_gain_what_packing_can(dp_size: int, budget: int, quadratic: float):
    """Random lengths spread 10 : 1, with and without the cost of attention: the costliest rank does at most 1 / 0.95
    of an even share of what is not padding, so that 0.95 of the ideal gain over padding is had."""
    for seed in range(20):
        lengths = torch.randint(400, 4001, (16 * dp_size,), generator=torch.Generator().manual_seed(seed)).tolist()
        cost = [n + quadratic * n * n for n in lengths]
        plan = plan_micro_batches(lengths, dp_size, PackingOptions(budget, None, quadratic))
        costliest = max(sum(cost[i] for micro in rank for i in micro) for rank in plan)
        padded = len(lengths) // dp_size * max(cost)
        assert padded / costliest > 0.95 * padded / (sum(cost) / dp_size)
        fewest = -(-sum(lengths) // (budget * dp_size))
        assert len(plan[0]) <= fewest + 1


def test_sequence_over_the_budget_is_refused():
    """A sequence longer than a micro-batch names both numbers and the flag."""
    with raises(ValueError, match="sequence 1 has 50 tokens and --max-tokens-per-micro-batch is 40"):
        plan_micro_batches([3, 50], 1, PackingOptions(40))


def _batch(*pairs):
    return batch_of(
        [
            Sample(Prompt(i, tuple(p), "", {}), Response(tuple(r), tuple(-0.1 * x for x in r), False, 0), i)
            for i, (p, r) in enumerate(pairs)
        ]
    )


@mark.parametrize("multiple", [1, 4])
def test_pack_points_at_response_tokens(multiple):
    """predict_K is the place before each response token, labels_K that token, columns follow the same order."""
    batch = _batch(([1, 2, 3], [4, 5]), ([6], [7, 8, 9]))
    micro = pack(batch, [1, 0], torch.device("cpu"), multiple)
    assert micro.tokens_1T[0, :9].tolist() == [6, 7, 8, 9, 1, 2, 3, 4, 5]
    assert micro.tokens_1T.shape[1] == (9 if multiple == 1 else 12)
    assert micro.cu_seqlens.tolist() == ([0, 4, 9] if multiple == 1 else [0, 4, 9, 12])
    assert micro.positions_1T[0, :9].tolist() == [0, 1, 2, 3, 0, 1, 2, 3, 4]
    assert micro.labels_K.tolist() == [7, 8, 9, 4, 5]
    assert (micro.tokens_1T[0, micro.predict_K + 1] == micro.labels_K).all()
    assert micro.sequence_K.tolist() == [0, 0, 0, 1, 1]
    torch.testing.assert_close(micro.rollout_logprobs_K, -0.1 * micro.labels_K.float())


def test_select_cuts_columns_to_the_longest_response():
    """select keeps rows in the given order and drops columns nobody uses."""
    batch = _batch(([1], [2]), ([1], [3, 4, 5]), ([1], [6, 7]))
    part = batch.select(torch.tensor([2, 0]))
    assert part.mask_BR.tolist() == [[True, True], [True, False]]
    assert part.rollout_logprobs_BR.shape == (2, 2) and part.group_B.tolist() == [2, 0]
