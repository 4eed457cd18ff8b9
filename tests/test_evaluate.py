"""pass@k by hand and by counting subsets, and the means that are made of it."""

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_rl.batch import Prompt
from megatron_rl.evaluate import ks_of, pass_at_k, summary


def test_pass_at_k_by_hand():
    """2 of 5 passed: k = 1 is 2/5, k = 3 misses with C(3, 3) / C(5, 3) = 1/10, k = 4 cannot miss."""
    assert [pass_at_k(5, 2, k) for k in (1, 3, 4)] == pytest.approx([0.4, 0.9, 1.0])
    assert pass_at_k(5, 0, 5) == 0.0 and pass_at_k(1, 1, 1) == 1.0


@given(st.integers(1, 8), st.data())
def test_pass_at_k_counts_subsets(n: int, data: st.DataObject):
    """It is the share of the k-subsets that hold a sample that passed."""
    passed, k = data.draw(st.integers(0, n)), data.draw(st.integers(1, n))
    subsets = list(combinations([i < passed for i in range(n)], k))
    assert pass_at_k(n, passed, k) == pytest.approx(sum(map(any, subsets)) / len(subsets), abs=1e-12)


def test_summary_by_source():
    """k is 1, 2, 4 ... and n; rows without a data_source count in the whole alone."""
    assert [ks_of(n) for n in (1, 2, 3, 8)] == [[1], [1, 2], [1, 2, 3], [1, 2, 4, 8]]
    rows = [{"data_source": "math"}, {"data_source": "math"}, {}]
    prompts = [Prompt(i, (1,), "", row) for i, row in enumerate(rows)]
    found = summary(prompts, [1.0, 0.0, 0.5, 0.0, 1.0, 1.0], 2, threshold=1.0)
    assert found == {
        "eval/reward": pytest.approx(3.5 / 6),
        "eval/pass@1": pytest.approx(0.5),
        "eval/pass@2": pytest.approx(2 / 3),
        "eval/reward/math": pytest.approx(1.5 / 4),
        "eval/pass@1/math": pytest.approx(0.25),
        "eval/pass@2/math": pytest.approx(0.5),
    }
