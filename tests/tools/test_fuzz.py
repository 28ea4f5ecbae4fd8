"""Inputs that fuzzing drew: those that found something, and some more."""

import pytest
import torch

from grpo_kernels import GRPOLossConfig, grpo_loss
from tests.tools.fuzz import Call, fuzz, verdict

# What was wrong is beside each.
FOUND = {
    # An entropy bonus without a mask: an expanded gradient was scaled in place.
    105863: "not compared: the reference is not finite",
    113187: "not compared: the reference is not finite",
    3773: "refused",  # num_items complex
    10846: "refused",
    8220: "refused",  # tensors on the meta device
    1074792: "refused",
    1030836: "refused",  # entropy a tensor
}


@pytest.mark.parametrize("seed", FOUND)
def test_what_was_found(seed):
    assert verdict(Call(seed)) == FOUND[seed]


def test_an_entropy_bonus_without_a_mask():
    logps, entropy = -torch.rand(4, 2) - 1, torch.rand(4, 2)
    grads = []
    for given in ({}, {"mask": torch.ones(4, 2, dtype=torch.bool)}):
        leaf = entropy.clone().requires_grad_()
        config = GRPOLossConfig(entropy_coef=0.5)
        (2 * grpo_loss(logps, torch.ones(4), entropy=leaf, config=config, **given).loss).backward()
        grads.append(leaf.grad)
    assert torch.equal(*grads) and (grads[0] < 0).all()


def test_some_more(capsys):
    told, bad = fuzz(float("inf"), 0, most=1500)
    assert not bad, capsys.readouterr().out
    # It says little if nearly all is refused.
    assert told["equal"] > 300 and told["refused"] > 300
