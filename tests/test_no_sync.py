"""No call waits for the device, beyond the one transfer of its row counts.

Fake tensors have no values: whoever asks for one (item, an `if`, a 0-d tensor as an index) raises,
which on a GPU would be a wait.
"""

import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from grpo_kernels import grpo_loss, routes
from grpo_kernels.backends import torch_backend
from grpo_kernels.checks import ValueChecks
from grpo_kernels.row_plan import RowPlan
from tests.helpers.batches import OBJECTIVES, config
from tests.helpers.flat_calls import fused_grpo_loss, linear_logprobs

B, T, H, V = 3, 5, 8, 11
# The torch backend compares addresses to see whether it works in place.
pytestmark = pytest.mark.filterwarnings("ignore:Accessing the data pointer")


@pytest.fixture(autouse=True)
def without_the_one_transfer(monkeypatch):
    """Replaces the transfer, and the looks at values that only a CPU takes."""

    def plan_rows(wanted, with_grad, checks, weight, num_tokens, *_):
        return RowPlan(None, num_tokens, num_tokens, 4, 4)

    monkeypatch.setattr(routes, "plan_rows", plan_rows)
    monkeypatch.setattr(ValueChecks, "check_without_sync", lambda self: None)
    monkeypatch.setattr(torch_backend, "_sum_of_products", lambda exps, x: (exps * x).sum(1))


@pytest.mark.parametrize("call", (grpo_loss, fused_grpo_loss))
@pytest.mark.parametrize("objective", (*OBJECTIVES, "cross_entropy"))
def test_reads_nothing(objective, call):
    options, names = OBJECTIVES.get(objective, ({}, ("old_logps", "ce_weights")))
    cfg = config(**options)
    with FakeTensorMode():
        kwargs = {name: torch.ones(B, T) for name in names}
        mask = torch.ones(B, T, dtype=torch.bool)
        if cfg.effective_aggregation == "dapo":
            kwargs["num_items"] = torch.ones(())
        if call is grpo_loss:
            head = (torch.ones(B, T, requires_grad=True),)
            kwargs["entropy"] = torch.ones(B, T)
        else:
            weight = torch.ones(V, H, requires_grad=True)
            targets = torch.ones(B, T, dtype=torch.long)
            head = (torch.ones(B, T, H, requires_grad=True), weight, targets)
        out = call(*head, torch.ones(B), mask, config=cfg, **kwargs)
        out.loss.backward()
        assert head[0].grad.shape == head[0].shape
        with pytest.raises(DataDependentOutputException):
            out.loss.item()


def test_log_probs_read_nothing():
    with FakeTensorMode():
        hidden = torch.ones(B, T, H, requires_grad=True)
        targets = torch.ones(B, T, dtype=torch.long)
        out = linear_logprobs(hidden, torch.ones(V, H), targets, entropy=True)
        (out.logps + out.entropy).sum().backward()
