"""The objectives that the scripts hand to train_step."""

from dataclasses import replace

import pytest
import torch
from models.cases import micro_batch

from megatron_rl.algorithms.losses import PolicyLossOptions
from megatron_rl.objectives import PolicyObjective, policy_objective


@pytest.mark.parametrize("name", ["ppo", "gspo", "cispo", "gmpo", "reinforce"])
def test_without_old_logprobs_the_current_ones_stand_for_them(name: str):
    """Loss and gradient are those of the first step after a pass; how far the engine is, against hand arithmetic."""
    micro = micro_batch([5, 3], 11, seed=0)
    rows_2K = torch.randn(2, 6, generator=torch.Generator().manual_seed(1))
    difference_K = torch.tensor([0.1, -0.2, 0.0, 0.3, 0.0, 0.0])
    micro = replace(
        micro,
        advantages_K=torch.tensor([1.0, -1.0, 2.0, 0.5, 0.0, -3.0]),
        weights_K=torch.full((6,), 1 / 6),
        rollout_logprobs_K=rows_2K[0] - difference_K,
    )
    loss = policy_objective(PolicyObjective(name, PolicyLossOptions(), tokens=6))
    dummy = replace(micro, weights_K=torch.zeros(6))  # what a rank without work of its own is given
    assert loss(rows_2K, dummy)[1]["engine_diff"] == loss(rows_2K, dummy)[1]["engine_k3"] == 0
    found = []
    for old_K in (None, rows_2K[0].clone()):
        rows = rows_2K.clone().requires_grad_()
        value, metrics = loss(rows, replace(micro, old_logprobs_K=old_K))
        value.backward()
        found.append((value.detach(), rows.grad, metrics))
    torch.testing.assert_close(found[0][:2], found[1][:2])
    assert float(found[0][2]["engine_diff"]) == pytest.approx(0.1)
    k3 = sum(torch.tensor(d).exp().item() - 1 - d for d in (0.1, -0.2, 0.3)) / 6
    assert float(found[0][2]["engine_k3"]) == pytest.approx(k3, rel=1e-4)
    assert "engine_diff" not in found[1][2]
