from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.data.order import Ordered


def files(*sizes):
    items, start = [], 0
    for size in sizes:
        items.append(list(range(start, start + size)))
        start += size
    return items


@settings(max_examples=50, deadline=None)
@given(sizes=st.lists(st.integers(1, 9), min_size=1, max_size=3), n=st.integers(1, 7), seed=st.integers(0, 5))
def test_an_epoch_sees_every_row_once(sizes, n, seed):
    """Without weights every epoch holds every row once, in batches of n and one smaller last one."""
    ordered = Ordered(files(*sizes), seed)
    for epoch in range(3):
        batches = [ordered.next_batch(n) for _ in range(ordered.batches_per_epoch(n))]
        assert ordered.epoch == epoch
        assert sorted(i for b in batches for i in b) == list(range(sum(sizes)))
        assert all(len(b) == n for b in batches[:-1]) and batches[-1]


def test_drop_last_leaves_the_smaller_batch_out():
    """With drop_last every batch is whole; a batch that the data cannot fill is refused."""
    ordered = Ordered(files(10), 1, drop_last=True)
    assert ordered.batches_per_epoch(4) == 2
    assert [len(ordered.next_batch(4)) for _ in range(5)] == [4] * 5
    assert ordered.epoch == 2
    with pytest.raises(ValueError, match="10 rows, a batch 11"):
        ordered.next_batch(11)


@settings(max_examples=30, deadline=None)
@given(stops=st.lists(st.integers(1, 6), min_size=1, max_size=3), weights=st.sampled_from([(), (0.8, 0.2)]))
def test_restored_runs_see_the_same_rows(stops, weights):
    """A run stopped and restored anywhere, several times, takes the same rows as one that never stopped."""
    whole = Ordered(files(7, 4), 3, weights)
    expected = [whole.next_batch(3) for _ in range(sum(stops))]
    state, seen = Ordered(files(7, 4), 3, weights).state(), []
    for steps in stops:
        part = Ordered(files(7, 4), 3, weights)
        part.restore(state)
        seen += [part.next_batch(3) for _ in range(steps)]
        state = part.state()
    assert seen == expected


def test_restore_refuses_another_seed_or_other_data():
    """A position means nothing under another seed or with another number of rows."""
    state = Ordered(files(7), 3).state()
    with pytest.raises(ValueError, match="seed 3, this run's has 4"):
        Ordered(files(7), 4).restore(state)
    with pytest.raises(ValueError, match="rows 7, this run's has 8"):
        Ordered(files(8), 3).restore(state)


def test_weights_mix_files():
    """Weights give each file its share of an epoch; over epochs a large file's rows are all seen, equally often."""
    ordered = Ordered(files(30, 10), 5, (1.0, 3.0))
    counts = Counter()
    for _ in range(3):
        epoch = ordered.next_batch(40)
        assert sum(i < 30 for i in epoch) == 10
        counts.update(epoch)
    assert {counts[i] for i in range(30)} == {1} and {counts[i] for i in range(30, 40)} == {9}
    with pytest.raises(ValueError, match="1 --data-weights for 2"):
        Ordered(files(1, 1), 5, (1.0,))
    with pytest.raises(ValueError, match="must be positive"):
        Ordered(files(1, 1), 5, (1.0, 0.0))


def test_epochs_and_seeds_differ_and_order_can_be_kept():
    """Epochs differ, seeds differ, and without shuffling rows come as they stand in the files."""
    first = Ordered(files(50), 1)
    one, two = first.next_batch(50), first.next_batch(50)
    assert one != two and one != Ordered(files(50), 2).next_batch(50)
    assert Ordered(files(2, 3), 1, shuffle=False).next_batch(5) == [0, 1, 2, 3, 4]
