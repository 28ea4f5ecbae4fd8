"""What comes as a support: refused by name, masked, empty, and ragged in any way."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers.batches import config
from tests.helpers.flat_calls import fused_grpo_loss, linear_logprobs, reference
from tests.helpers.supports import csr

IDS, OFFSETS = [5, 7, 7, 9, 2], [0, 2, 4, 5]
TARGETS = [7, 9, 2]


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"ids": [5, 7, 99, 9, 2]}, ValueError, r"support.token_ids: expected ids in \[0, 20\)"),
        ({"ids": [-1, 7, 7, 9, 2]}, ValueError, r"support.token_ids: expected ids in \[0, 20\)"),
        ({"ids": [7, 7, 7, 9, 2]}, ValueError, r"support.token_ids: expected each id once"),
        ({"ids": [5, 7, 7, 8, 2]}, ValueError, r"support: expected the target .* \(1 of them\)"),
        ({"offsets": [0, 3, 2, 5]}, ValueError, r"support.offsets: expected offsets that start"),
        ({"offsets": [1, 2, 4, 5]}, ValueError, r"support.offsets: .* \(1 of them\)"),
        ({"offsets": [0, 2, 4, 4]}, ValueError, r"support.offsets: .* end at the 5 ids"),
        ({"offsets": [0, 2, 4, 6]}, ValueError, r"support.offsets: .* end at the 5 ids"),
        ({"offsets": [0, 2, 5]}, ValueError, r"support.offsets: expected shape \[4\]"),
        ({"ids": [[5, 7, 7, 9, 2]]}, ValueError, r"token_ids: expected shape \[K\]"),
        ({"ids": [5.0, 7, 7, 9, 2]}, TypeError, r"support.token_ids: expected dtype int64, int32"),
        ({"support": 3}, TypeError, "support: expected a Support of token_ids"),
        ({"capturable": True}, ValueError, "support: expected None with capturable=True"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("call", ["fused", "linear"])
def test_bad_supports_are_refused_by_name(change, error, message, call):
    change = dict(change)
    ids, offsets = change.pop("ids", IDS), change.pop("offsets", OFFSETS)
    options = {"support": (torch.tensor(ids), torch.tensor(offsets)), **change}
    arguments = [torch.randn(3, 4), torch.randn(20, 4), torch.tensor(TARGETS)]
    with pytest.raises(error, match=message):
        if call == "fused":
            fused_grpo_loss(*arguments, torch.ones(3), **options)
        else:
            linear_logprobs(*arguments, **options)


def test_sets_that_overlap_behind_a_masked_token_are_refused():
    kept = (torch.tensor([5, 7, 9, 2, 3]), torch.tensor([0, 3, 2, 5]))
    mask = torch.tensor([True, False, True])
    with pytest.raises(ValueError, match=r"support.offsets: expected offsets .* \(1 of them\)"):
        linear_logprobs(
            torch.randn(3, 4), torch.randn(20, 4), torch.tensor([7, 1, 2]), mask=mask, support=kept
        )


def test_masked_tokens_may_have_anything():
    """Offsets and ids that mean nothing, in the middle and at both ends."""
    mask = torch.tensor([0, 1, 0, 0, 1, 0]).bool()
    ids = torch.tensor([-3, 99, 7, 5, 50, 9, 2, 2])
    offsets = torch.tensor([44, 2, 4, -9, 5, 7, -5])
    hidden, weight = torch.randn(6, 4), torch.randn(20, 4)
    targets = torch.tensor([-1, 5, 77, -1, 2, 3])
    out = linear_logprobs(hidden, weight, targets, mask=mask, support=(ids, offsets))
    clean = csr([[], [7, 5], [], [], [9, 2], []])
    expected = linear_logprobs(hidden, weight, targets, mask=mask, support=clean)
    torch.testing.assert_close(out, expected)
    assert out.logps[1] < 0 and out.logps[4] < 0


@pytest.mark.parametrize("shape", [(0, 3), (2, 0), (0,)])
def test_no_tokens(shape):
    kept = (torch.zeros(0, dtype=torch.int32), torch.zeros(torch.Size(shape).numel() + 1).int())
    hidden, weight = torch.randn(*shape, 4).requires_grad_(), torch.randn(9, 4).requires_grad_()
    targets = torch.zeros(shape, dtype=torch.long)
    out = fused_grpo_loss(hidden, weight, targets, torch.zeros(shape), support=kept)
    out.loss.backward()
    assert out.loss == 0 and not weight.grad.any()


@st.composite
def ragged(draw):
    """Sets with their targets, masks, and rubbish where tokens are masked."""
    V, N = 13, draw(st.integers(1, 6))
    tokens = []
    for _ in range(N):
        entries = draw(st.lists(st.integers(0, V - 1), unique=True, max_size=V))
        target = draw(st.sampled_from(entries)) if entries else draw(st.integers(0, V - 1))
        active = draw(st.booleans())
        if not active:
            entries = draw(st.lists(st.integers(-5, V + 5), max_size=4))
        tokens.append((entries, target, active))
    return V, tokens


@settings(deadline=None, max_examples=60)
@given(ragged(), st.sampled_from(["dapo", "gspo"]), st.integers(0, 99), st.sampled_from([0, 3]))
def test_any_ragged_support(case, loss_type, seed, rows):
    V, tokens = case
    g = torch.Generator().manual_seed(seed)
    N = len(tokens)
    hidden, weight = torch.randn(1, N, 5, generator=g), torch.randn(V, 5, generator=g)
    kept = csr([entries for entries, _, _ in tokens])
    targets = torch.tensor([[t for _, t, _ in tokens]])
    mask = torch.tensor([[a for _, _, a in tokens]])
    results = []
    for call, dtype in (
        (fused_grpo_loss, torch.float32),
        (reference.fused_grpo_loss, torch.float64),
    ):
        h, w = (x.to(dtype, copy=True).requires_grad_() for x in (hidden, weight))
        call(
            h, w, targets, torch.tensor([1.5], dtype=dtype), mask,
            old_logps=torch.full((1, N), -0.7, dtype=dtype), support=kept,
            config=config(loss_type=loss_type, entropy_coef=0.1),
        ).loss.backward()  # fmt: skip
        results.append((h.grad, w.grad))
    for actual, expected in zip(*results, strict=True):
        assert (actual - expected).norm() <= 1e-5 * expected.norm() + 1e-7


def test_double_backward_is_refused():
    weight = torch.randn(20, 4, requires_grad=True)
    kept = (torch.tensor(IDS), torch.tensor(OFFSETS))
    out = linear_logprobs(torch.randn(3, 4), weight, torch.tensor(TARGETS), support=kept)
    with pytest.raises(RuntimeError, match="double backward"):
        torch.autograd.grad(out.logps.sum(), weight, create_graph=True)
