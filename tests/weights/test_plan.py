"""The planner's promises, checked by carrying plans out on small arrays; every HF element is a number of its own."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from weights import reference as ref

from megatron_rl.weights.arch import Dims
from megatron_rl.weights.layouts import Block, Param, megatron_shards, train_layout
from megatron_rl.weights.overlap import Overlap
from megatron_rl.weights.plan import (
    Placement,
    Plan,
    Reshard,
    best_placement,
    default_placement,
    hybridflow_bound,
)
from megatron_rl.weights.rects import Copy, Rect, merge, uncovered
from megatron_rl.weights.vllm_like import vllm_like_blocks

UNTOUCHED = -7


class Run:
    """Every rank's Megatron tensors, and what its vLLM tensors must become."""

    def __init__(self, dims: Dims, tp: int, pp: int, vpp: int, dp: int, rollout_tp: int, ep: int = 1) -> None:
        layout, self.world, hf = train_layout(dims, tp, pp, vpp, ep), tp * pp * dp, ref.hf_tensors(dims)
        expert_tp = tp if ep == 1 else 1
        self.at = [(r % tp, r // (tp * dp), r % (tp * dp) // expert_tp % ep) for r in range(self.world)]
        shards, self.shard_of_rank = megatron_shards(dims, layout, self.at)
        self.overlap = Overlap(shards, [vllm_like_blocks(dims, r, rollout_tp) for r in range(rollout_tp)])
        self.placement = default_placement(self.world, rollout_tp)
        self.wanted = [ref.vllm_tensors(dims, hf, r, rollout_tp) for r in range(rollout_tp)]
        self.sources = [
            ref.megatron_tensors(dims, hf, ref.Shard(t, tp, layout.stages[p], p == 0, p == pp - 1, ep_rank=e, ep=ep))
            for t, p, e in self.at
        ]

    def wanted_by(self, rank: int, placement: Placement) -> ref.Tensors:
        return self.wanted[placement[rank][1]]


def view(tensors: ref.Tensors, rect: Rect) -> np.ndarray:
    flat = tensors[rect.param].reshape(-1)
    end = rect.offset + (rect.rows - 1) * rect.stride + rect.cols
    assert 0 <= rect.offset and end <= flat.size, "inside the tensor"
    step = flat.strides[0]
    return np.lib.stride_tricks.as_strided(flat[rect.offset :], (rect.rows, rect.cols), (rect.stride * step, step))


def carry_out(run: Run, plans: list[Plan], placement: Placement) -> list[ref.Tensors]:
    """Every rank's vLLM tensors after the sync. Fails where an element is written twice or not at all."""
    result = []
    for rank, plan in enumerate(plans):
        wanted, tensors, writes = run.wanted_by(rank, placement), {}, {}
        for name, x in wanted.items():
            alias = plan.aliases.get(name)
            tensors[name] = np.full(x.shape, UNTOUCHED)
            writes[name] = np.zeros(x.shape, np.int64)
            if alias:
                flat = run.sources[rank][alias.param].reshape(-1)
                tensors[name] = flat[alias.offset : alias.offset + x.size].reshape(x.shape)
                writes[name] += 1
        steps = [(np.zeros((rect.rows, rect.cols)), rect) for rect in plan.zeros]
        steps += [(view(run.sources[rank], copy.src), copy.dst) for copy in plan.copies]
        for peer in {move.peer for move in plan.receives}:
            sent = [move.rect for move in plans[peer].sends if move.peer == rank]
            received = [move.rect for move in plan.receives if move.peer == peer]
            assert peer != rank and [(r.rows, r.cols) for r in sent] == [(r.rows, r.cols) for r in received]
            steps += [(view(run.sources[peer], src), dst) for src, dst in zip(sent, received, strict=True)]
        for values, dst in steps:
            assert dst.param not in plan.aliases
            view(tensors, dst)[:] = values
            view(writes, dst)[:] += 1
        assert all((count == 1).all() for count in writes.values()), "every element exactly once"
        result.append(tensors)
    for rank, plan in enumerate(plans):
        assert {m.peer for m in plan.sends} == {
            r for r in range(len(plans)) if any(m.peer == rank for m in plans[r].receives)
        }
    return result


def check(run: Run, placement: Placement, gpus_per_node: int) -> list[Plan]:
    """Carries the plans out and compares with slicing; counts what was received without the planner."""
    reshard = Reshard(run.overlap, run.shard_of_rank, placement, gpus_per_node)
    plans = [reshard.plan(rank) for rank in range(run.world)]
    traffic = reshard.traffic()
    for rank, tensors in enumerate(carry_out(run, plans, placement)):
        wanted = run.wanted_by(rank, placement)
        for name, x in wanted.items():
            np.testing.assert_array_equal(tensors[name], x, err_msg=f"rank {rank} {name}")
        own = np.concatenate([x.reshape(-1) for x in run.sources[rank].values()])
        needs = np.concatenate([x.reshape(-1) for x in wanted.values()])
        lacking = int((~np.isin(needs, own) & (needs > 0)).sum())
        assert lacking == sum(m.rect.numel for m in plans[rank].receives) == traffic.received[rank]
        assert sum(m.rect.numel for m in plans[rank].sends) == traffic.sent[rank]
        parts = traffic.aliased + traffic.zeroed + traffic.copied + traffic.received
        assert parts[rank] == traffic.needed[rank] == needs.size
    check_balance(run, placement, gpus_per_node, traffic.sent)
    return plans


def check_balance(run: Run, placement: Placement, gpus_per_node: int, sent: np.ndarray) -> None:
    """The largest sender sends at most twice the mean of all that could serve, or the least that a largest sender can:
    what only some ranks hold, over their number. Counted from values, without the planner.
    """
    own = [np.concatenate([x.reshape(-1) for x in tensors.values()]) for tensors in run.sources]
    holds = np.zeros((run.world, max(x.max() for x in own) + 1), bool)
    for rank, values in enumerate(own):
        holds[rank, values] = True
    node, demand = np.arange(run.world) // gpus_per_node, Counter[bytes]()
    for rank in range(run.world):
        needs = np.concatenate([x.reshape(-1) for x in run.wanted_by(rank, placement).values()])
        serves = holds[:, needs[(needs > 0) & ~holds[rank, needs]]]
        near = serves & (node == node[rank])[:, None]
        demand.update(column.tobytes() for column in np.where(near.any(0), near, serves).T)
    sets = np.array([np.frombuffer(key, bool) for key in demand]).reshape(-1, run.world)
    could, elements = sets.any(0), np.array(list(demand.values()))
    assert not sent[~could].any()
    least = [elements[~sets[:, ~some].any(1)].sum() / some.sum() for some in sets]
    assert not could.any() or sent.max() <= max(2 * sent[could].mean(), *least), (sent, least)


def contiguous_piece(x: np.ndarray, tensors: ref.Tensors) -> bool:
    """x's elements lie in one of the tensors, one after the other in the same order."""
    flat = x.reshape(-1)
    for y in (y.reshape(-1) for y in tensors.values()):
        for start in np.flatnonzero(y == flat[0]) if flat[0] else range(y.size):
            if np.array_equal(y[start : start + flat.size], flat):
                return True
    return False


CUTS = [(tp, pp, vpp) for tp in (1, 2, 3, 4, 8) for pp in (1, 2, 3) for vpp in (1, 2) if pp > 1 or vpp == 1]


@pytest.mark.parametrize(("tp", "pp", "vpp"), CUTS)
def test_any_layout(tp: int, pp: int, vpp: int):
    """Every vLLM element is written exactly once with the right value, and what is received is what is lacking.

    Uneven stages (5 layers, or 6 with virtual pipelining), padded vocabularies, tied heads, shared KV heads, DP 1 and
    2, rollout TP 1, 2, 4 and 8.
    """
    models = [ref.THREE] if tp == 3 else [ref.LLAMA, ref.QWEN2, ref.QWEN3]
    for number, (dp, rollout_tp) in enumerate((dp, r) for dp in (1, 2) for r in (1, 2, 4, 8)):
        dims = replace(models[(number + pp + vpp) % len(models)], layers=4 + vpp if vpp == 1 else 6)
        if tp * pp * dp % rollout_tp or (tp == 3 and rollout_tp > 2):
            continue
        run = Run(dims, tp, pp, vpp, dp, rollout_tp)
        check(run, run.placement, gpus_per_node=tp * dp)


@pytest.mark.parametrize("dims", [ref.MIXTRAL, ref.QWEN3_MOE], ids=lambda d: d.family)
@pytest.mark.parametrize(
    ("tp", "pp", "dp", "ep"), [(1, 1, 4, 4), (2, 1, 2, 2), (1, 2, 2, 2), (2, 1, 2, 4), (4, 1, 1, 1)]
)
def test_experts(dims: Dims, tp: int, pp: int, dp: int, ep: int):
    """Experts spread over expert-parallel ranks end up in vLLM's one tensor of all experts."""
    for rollout_tp in (1, 2, 4):
        run = Run(dims, tp, pp, 1, dp, rollout_tp, ep)
        check(run, run.placement, gpus_per_node=run.world)


@pytest.mark.parametrize("dims", [ref.LLAMA, ref.QWEN2, ref.QWEN3], ids=lambda d: d.family)
@pytest.mark.parametrize(
    ("tp", "pp", "dp", "rollout_tp"), [(1, 1, 2, 2), (2, 1, 1, 2), (2, 2, 1, 2), (1, 2, 1, 1), (4, 1, 1, 4)]
)
def test_alias_wherever_possible(dims: Dims, tp: int, pp: int, dp: int, rollout_tp: int):
    """A vLLM parameter is an alias exactly where it is a contiguous piece of one Megatron parameter of the rank.

    Padding counts as equal to padding; a parameter that is nothing but padding needs no alias.
    """
    run = Run(dims, tp, pp, 1, dp, rollout_tp)
    plans = check(run, run.placement, run.world)
    for rank, plan in enumerate(plans):
        wanted = run.wanted_by(rank, run.placement)
        possible = {name for name, x in wanted.items() if x.any() and contiguous_piece(x, run.sources[rank])}
        assert set(plan.aliases) == possible
        assert len(possible) > 0


def test_same_layout_moves_nothing():
    """At equal TP and PP 1 nothing is received, the bound is 0, and only QKV is copied."""
    run = Run(ref.LLAMA, tp=2, pp=1, vpp=1, dp=2, rollout_tp=2)
    for plan in check(run, run.placement, 4):
        assert not plan.receives and not plan.sends
        # One KV head a rank: Megatron's [q..q k v] is vLLM's [q | k | v].
        assert not plan.copies and len(plan.aliases) == 5 * 6 + 3
    run = Run(ref.QWEN3, tp=2, pp=1, vpp=1, dp=1, rollout_tp=2)
    for plan in check(run, run.placement, 2):
        assert not plan.receives
        assert {copy.dst.param.split(".")[-2] for copy in plan.copies} == {"qkv_proj"}
        assert len(plan.copies) == 5 * 3, "one rectangle each for q, k and v"
    assert hybridflow_bound(10**9, 2, 2) == 0


def test_copied_parameters_are_not_aliased():
    """A parameter named in `copied` gets its own memory, the others stay aliases."""
    run = Run(ref.LLAMA, 1, 1, 1, 1, 1)
    names = {"model.norm.weight", "model.embed_tokens.weight"}
    sources = [tuple(shard.values()) for shard in run.overlap.sources]
    overlap = Overlap(sources, run.overlap.targets, copied=names)
    plan = Reshard(overlap, [0], run.placement, 1).plan(0)
    everything = Reshard(run.overlap, [0], run.placement, 1).plan(0)
    assert set(everything.aliases) - set(plan.aliases) == names
    assert names <= {copy.dst.param for copy in plan.copies}
    assert [rect.param for rect in plan.zeros if rect.param in names] == ["model.embed_tokens.weight"]


@pytest.mark.parametrize(("tp", "pp", "dp", "rollout_tp", "gpus_per_node"), [(4, 1, 4, 1, 4), (2, 2, 2, 2, 4)])
def test_near_sources_first(tp: int, pp: int, dp: int, rollout_tp: int, gpus_per_node: int):
    """What a rank of the same node holds is never fetched from another node."""
    run = Run(ref.LLAMA, tp, pp, 1, dp, rollout_tp)
    plans = check(run, run.placement, gpus_per_node)
    for rank, plan in enumerate(plans):
        node = range(rank - rank % gpus_per_node, rank - rank % gpus_per_node + gpus_per_node)
        near = np.concatenate([x.reshape(-1) for r in node for x in run.sources[r].values()])
        wanted = run.wanted_by(rank, run.placement)
        far = [view(wanted, move.rect) for move in plan.receives if move.peer not in node]
        assert not any(np.isin(values, near).any() for values in far)
        assert bool(far) == (pp > 1), "a node of one stage lacks the other stages and nothing else"


def test_padding_is_not_aliased_to_weights():
    """A padded vLLM parameter is an alias where padding lies on padding; on real weights it is copied and zeroed."""
    real, padded = Block("w", 0, 0, 4, 2, "m", 0, 2), Block("w", 0, 0, 2, 2, "m", 0, 2)
    target = Param("v", (4, 2), (replace(padded, param="v"),))
    rest = Block("w", 2, 0, 2, 2, "m", 4, 2)
    for blocks, aliased in (((padded,), True), ((real,), False), ((padded, rest), False)):
        overlap = Overlap([(Param("m", (4, 2), blocks),)], [(target,)])
        plan = Reshard(overlap, [0], default_placement(1, 1), 1).plan(0)
        assert (set(plan.aliases) == {"v"}) == aliased
        assert (plan.zeros == (Rect("v", 4, 4, 1, 4),)) == (not aliased)


@pytest.mark.parametrize(
    ("tp", "pp", "dp", "rollout_tp"),
    [(4, 2, 2, 2), (2, 3, 2, 2), (1, 2, 4, 1), (1, 3, 4, 4), (8, 1, 2, 1), (2, 2, 4, 8)],
)
def test_senders_are_balanced(tp: int, pp: int, dp: int, rollout_tp: int):
    """Among the ranks that hold the same shard, on one node, the largest sender sends at most twice the mean."""
    run = Run(ref.LLAMA, tp, pp, 1, dp, rollout_tp)
    traffic = Reshard(run.overlap, run.shard_of_rank, run.placement, run.world).traffic()
    for shard in set(run.shard_of_rank):
        sent = traffic.sent[np.array(run.shard_of_rank) == shard]
        assert sent.max() <= 2 * sent.mean(), sent


def test_one_receiver_many_holders():
    """Where more ranks hold something than lack it, the holders share the sending."""
    block = Block("w", 0, 0, 8, 6, "m", 0, 6)
    overlap = Overlap([(Param("m", (8, 6), (block,)),), ()], [(Param("v", (8, 6), (replace(block, param="v"),)),)])
    traffic = Reshard(overlap, [0, 0, 0, 0, 1], default_placement(5, 1), 5).traffic()
    assert traffic.sent.tolist() == [12, 12, 12, 12, 0]
    assert traffic.received.tolist() == [0, 0, 0, 0, 48]


@pytest.mark.parametrize(
    ("tp", "pp", "dp", "rollout_tp"), [(4, 1, 1, 2), (8, 1, 1, 2), (8, 1, 1, 4), (4, 2, 1, 2), (8, 1, 2, 1)]
)
def test_best_placement_reaches_the_bound(tp: int, pp: int, dp: int, rollout_tp: int):
    """With the best grouping the mean rank receives HybridFlow's bound, up to what every rank holds (norms)."""
    dims = replace(ref.QWEN3, layers=6, hidden=32, ffn=64, vocab=256, tied=False)
    run = Run(dims, tp, pp, 1, dp, rollout_tp)
    placement = best_placement(run.overlap, run.shard_of_rank, gpus_per_node=tp * pp)
    check(run, placement, run.world)
    replicas = {}
    for rank, (replica, tp_rank) in enumerate(placement):
        replicas.setdefault(replica, {})[tp_rank] = rank
    assert all(sorted(ranks) == list(range(rollout_tp)) for ranks in replicas.values())
    model = sum(x.size for x in ref.hf_tensors(dims).values())
    bound = hybridflow_bound(model, tp * pp, rollout_tp)
    best = Reshard(run.overlap, run.shard_of_rank, placement, run.world).traffic().received.mean()
    usual = Reshard(run.overlap, run.shard_of_rank, run.placement, run.world).traffic().received.mean()
    assert abs(best - bound) <= 0.02 * bound
    assert best <= usual and (best < usual or placement == run.placement)


def test_what_nobody_holds_is_refused():
    """A tensor that vLLM wants and Megatron lacks, or holds in part, is an error that names both."""
    want = Param("v", (4, 2), (Block("w", 0, 0, 4, 2, "v", 0, 2),))
    with pytest.raises(ValueError, match="v wants w, which no Megatron parameter holds"):
        Overlap([()], [(want,)])
    with pytest.raises(ValueError, match="2 of the elements of w that vLLM's v wants"):
        Overlap([(Param("m", (3, 2), (Block("w", 0, 0, 3, 2, "m", 0, 2),)),)], [(want,)])
    with pytest.raises(ValueError, match="overlap at element 2"):
        uncovered("v", 8, [Block("w", 0, 0, 2, 2, "v", 0, 2), Block("w", 2, 0, 2, 2, "v", 2, 2)])


@settings(max_examples=200)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3), st.integers(1, 3), st.integers(1, 4)), max_size=12))
def test_merge_keeps_order_and_elements(steps: list[tuple[int, int, int, int]]):
    """Merged copies read and write the same elements in the same order as the copies they came from."""
    copies, src, dst = [], 0, 0
    for gap_src, gap_dst, rows, cols in steps:
        stride_src, stride_dst = cols + gap_src, cols + gap_dst
        copies.append(Copy(Rect("a", src, stride_src, rows, cols), Rect("b", dst, stride_dst, rows, cols)))
        src, dst = src + rows * stride_src, dst + rows * stride_dst
    merged = merge(copies)
    assert len(merged) <= len(copies)
    for side in ("src", "dst"):
        before, after = ([at for c in cs for at in elements(getattr(c, side))] for cs in (copies, merged))
        assert before == after


def elements(rect: Rect) -> list[int]:
    return [rect.offset + i * rect.stride + j for i in range(rect.rows) for j in range(rect.cols)]


@settings(max_examples=100)
@given(st.sets(st.integers(0, 30)))
def test_uncovered_is_the_complement(covered: set[int]):
    """Covered and uncovered elements are all of them, each once."""
    blocks = [Block("w", 0, 0, 1, 1, "v", at, 1) for at in covered]
    rest = [at for rect in uncovered("v", 31, blocks) for at in elements(rect)]
    assert sorted([*covered, *rest]) == list(range(31))
