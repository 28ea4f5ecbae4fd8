"""The fuzzer draws all that there is to draw; inputs that found something, and some more."""

import random
from dataclasses import fields

import pytest
import torch

from grpo_kernels import GRPOLossConfig, grpo_loss
from tests.helpers.batches import config
from tests.tools.fuzz import Call, DropIn, fuzz, one_rank, verdict
from tests.tools.fuzz_inputs import (
    CONFIG_FIELDS,
    DROP_INS,
    FIELDS,
    FUNCTIONS,
    GENERATORS,
    OURS,
    Built,
    Valid,
    parameters,
)

# Calls that were not refused in words: what was given.
FOUND = [
    ("grpo_loss", "num_items", torch.tensor(1j)),
    ("linear_logprobs", "entropy", torch.tensor(1.0)),
    ("linear_logprobs", "targets", torch.zeros(4, 5, dtype=torch.int64, device="meta")),
    ("selective_log_softmax", "logits", torch.zeros(4, 5, device="meta")),
    ("grpo_loss", "config", Built(config, {"vespo_lambda_neg": torch.ones(3)})),
    ("liger", "epsilon_low", "x"),
]

# Of what is refused in the end.
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(autouse=True, scope="module")
def shared_by_one():
    with one_rank():
        yield


def test_every_option_has_a_generator():
    names = {OURS.get(name, name) for call in FUNCTIONS for name in parameters(call)}
    assert names - CONFIG_FIELDS == GENERATORS.keys() - CONFIG_FIELDS
    for held, generators in FIELDS.items():
        assert {field.name for field in fields(held)} == generators.keys()


@pytest.mark.parametrize("call", FUNCTIONS)
def test_a_valid_call_is_right(call):
    """As drawn, nearly all are; else the pairs that cannot be computed are refused."""
    told = []
    for seed in range(25):
        drawn = (DropIn if call in DROP_INS else Call)(0)
        drawn.name = call
        drawn.given = drawn._valid(Valid(call, random.Random(seed)))
        told.append(verdict(drawn))
    assert sum(x.startswith("equal") for x in told) >= 15, told


@pytest.mark.parametrize(("call", "name", "value"), FOUND)
def test_what_was_found(call, name, value):
    drawn = (DropIn if call in DROP_INS else Call)(0)
    drawn.name = call
    drawn.given = drawn._valid(Valid(call, random.Random(0))) | {name: value}
    assert verdict(drawn) == "refused"


def test_an_entropy_bonus_without_a_mask():
    """An expanded gradient was scaled in place."""
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
