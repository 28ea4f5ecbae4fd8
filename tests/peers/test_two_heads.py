"""Divergences of two heads equal TRL's of logits, and Liger's, from hidden states."""

import pytest
import torch

from grpo_kernels import Reference, fused_distillation_loss

KINDS = {0.0: "forward", 0.3: "jsd", 1.0: "reverse"}  # by the peers' beta


def peer_loss(peer, hidden, weight, other, targets, beta):
    """The mean over tokens whose target is not -100."""
    if peer == "TRL":
        gkd = pytest.importorskip("trl.experimental.gkd", reason="needs the extra 'peers'")
        both = (x @ w.T for x, w in ((hidden, weight), other))
        total = gkd.GKDTrainer.generalized_jsd_loss(*both, targets, beta=beta, reduction="sum")
        return total / (targets != -100).sum()
    chunked = pytest.importorskip("liger_kernel.chunked_loss", reason="needs the extra 'peers'")
    loss = chunked.LigerFusedLinearJSDLoss(
        weight_hard_loss=0.0, weight_soft_loss=1.0, beta=beta, compiled=False, chunk_size=7
    )
    states = (hidden.flatten(0, 1), weight, other.hidden.flatten(0, 1), other.head)
    return loss(*states, targets.flatten())


@pytest.mark.parametrize("beta", KINDS)
@pytest.mark.parametrize("peer", ["TRL", "Liger"])
def test_equal(peer, beta):
    g = torch.Generator().manual_seed(0)
    hidden, states = torch.randn(3, 7, 24, generator=g), torch.randn(3, 7, 40, generator=g)
    weight, head = torch.randn(257, 24, generator=g), torch.randn(257, 40, generator=g)
    mask = torch.rand(3, 7, generator=g) < 0.7
    targets = torch.randint(257, (3, 7), generator=g).masked_fill(~mask, -100)
    other, results = Reference(states, head / 2), {}
    for name in ("ours", peer):
        leaves = [hidden.clone().requires_grad_(), (weight / 2).requires_grad_()]
        if name == "ours":
            kind, options = KINDS[beta], {"beta": beta} if 0 < beta < 1 else {}
            loss = fused_distillation_loss(*leaves, other, mask, kind=kind, **options).loss
        else:
            loss = peer_loss(peer, *leaves, other, targets, beta)
        loss.backward()
        results[name] = [loss.detach(), *(x.grad for x in leaves)]
    for ours, theirs in zip(results["ours"], results[peer], strict=True):
        assert theirs.norm() > 0
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)
