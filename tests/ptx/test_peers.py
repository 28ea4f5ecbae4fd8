"""Kernels of Liger and TRL, unchanged from their wheels: a test of the emulator, and of baselines.

Results are compared with float64 and with ours; tests state the findings of the checks, and where
a peer is wrong.
"""

import pytest
import torch
import torch.nn.functional as F

from grpo_kernels import (
    Execution,
    GRPOLossConfig,
    LMHead,
    fused_grpo_loss,
    grpo_loss,
    linear_logprobs,
    reference,
)
from tests.helpers.batches import relative_error
from tests.helpers.peers import (  # noqa: F401
    TEMPERATURE,
    WITHOUT_OTHER,
    B,
    T,
    V,
    batch,
    compare,
    finding_kinds,
    lenient,
    logps_of,
)  # fmt: skip
from tests.ptx import EmulatedDriver

pytestmark = pytest.mark.usefixtures("lenient")
TRITON = Execution(backend="triton")
SEQUENCE = {"importance_sampling_level": "sequence"}


def liger_loss(logits, **options):
    """Returns Liger's loss of the batch at these logits."""
    kernels = pytest.importorskip("liger_kernel.transformers.grpo_loss")
    _, ids, mask, old, ref, A = batch()
    args = (ids, A, mask.float(), TEMPERATURE)
    options = {"beta": 0.0, "inplace": False, **options}
    ref = ref if options["beta"] else None
    return kernels.triton_grpo_loss(logits, old, ref, *args, reduce=True, **options)[0]


def reference_loss(logits, advantages=None, call=reference.grpo_loss, sampled=None, **options):
    _, ids, mask, old, ref, A = batch()
    kwargs = {"ref_logps": ref} if options.get("beta") else {}
    kwargs |= {} if sampled is None else {"sampling_logps": sampled}
    A, cfg = A if advantages is None else advantages, GRPOLossConfig(**options)
    return call(logps_of(logits, ids), A, mask, old_logps=old, config=cfg, **kwargs).loss


def sampled_logps():
    old = batch()[3]
    return old - 0.36 * torch.randn(B, T, generator=torch.Generator().manual_seed(1))


KL = {"beta": 0.1, "use_bias_correction_kl": False}
HIGH = {"epsilon_high": 0.4}
# id: options of both, of Liger alone, of our config alone
PATHS = {
    "token": ({}, {}, HIGH),
    "kl": (KL, {}, HIGH),
    "delta": ({"delta": 1.5}, {}, HIGH),
    "grpo": ({"loss_type": "grpo"}, {}, HIGH),
    "cispo": ({"loss_type": "cispo"}, {"eps_high": 5.0}, {"epsilon_high": 5.0}),
    "sapo": ({"loss_type": "sapo"}, {}, {}),
    "sequence": ({**SEQUENCE, "loss_type": "grpo"}, {}, HIGH),
    "sequence_kl": ({**SEQUENCE, **KL, "loss_type": "grpo"}, {}, HIGH),
    "corrected_kl": ({"beta": 0.1, "use_bias_correction_kl": True}, {}, HIGH),
    "vllm_ratio": ({}, {"vllm_is_ratio": True}, {
        "is_correction": "token_truncate", "is_clip_max": 1.5, **HIGH}),
    "bnpo": ({"loss_type": "bnpo"}, {}, HIGH),
    "dr_grpo": ({"loss_type": "dr_grpo", "max_completion_length": 20}, {}, HIGH),
    "vespo": ({"loss_type": "vespo"}, {}, {}),
    "sequence_delta": (
        {**SEQUENCE, "loss_type": "grpo", "delta": 1.05}, {"eps_high": 0.02}, {"epsilon_high": 0.02}
    ),
    "sequence_corrected_kl": (
        {**SEQUENCE, "loss_type": "grpo", "beta": 0.1, "use_bias_correction_kl": True}, {}, HIGH
    ),
}  # fmt: skip


@pytest.mark.parametrize("inplace", (False, True), ids=("apart", "in_place"))
@pytest.mark.parametrize("path", PATHS)
def test_liger_grpo_is_ours(path, inplace):
    both, theirs, ours = PATHS[path]
    logits, theirs = batch()[0], {**theirs, "inplace": inplace}
    if "vllm_is_ratio" in theirs:
        ours = {**ours, "sampled": sampled_logps()}
        ratio = (batch()[3] - ours["sampled"]).exp()
        assert (ratio > ours["is_clip_max"]).any()
        theirs["vllm_is_ratio"] = ratio.clamp(max=ours["is_clip_max"])

    def plain(x, call=reference.grpo_loss):
        return reference_loss(x, call=call, **both, **ours)

    actual = compare(lambda x: liger_loss(x * 1, **both, **theirs), plain, logits)
    # On a CPU sums round as wide as its vectors are, and vespo takes them to the third power.
    plain_grads = compare(lambda x: plain(x, grpo_loss), plain, logits, tolerance=3e-6)
    apart = 4e-5 if EmulatedDriver.settings.error else 4e-6
    assert all(relative_error(a, b) <= apart for a, b in zip(actual, plain_grads, strict=True))


@pytest.mark.parametrize("level", ("token", "sequence"))
def test_liger_luspo(level):
    """Liger averages loss times length (grpo_loss.py:597); TRL's loss and ours sum over tokens.

    The gradient of the loss has one column (928), of which the kernel reads T (474): at the token
    level what lies behind. At the sequence level it is multiplied by the mask before.
    """
    logits, _, mask, *_, A = batch()
    x, exact = logits.clone().requires_grad_(), logits.double().requires_grad_()
    options = {"loss_type": "luspo", "importance_sampling_level": level}
    loss = liger_loss(x * 1, **options)
    truth = reference_loss(exact, A * mask.sum(1) / T, epsilon_high=0.4, **options)
    (actual,), (gradient,) = torch.autograd.grad(loss, x), torch.autograd.grad(truth, exact)
    assert relative_error(loss.detach(), truth.detach()) <= 2e-6
    if level == "sequence":
        assert relative_error(actual, gradient) <= 3e-6 and finding_kinds() == set()
    else:
        assert not relative_error(actual, gradient) <= 1
        assert finding_kinds() == {("out of bounds", "_grpo_loss_bwd_kernel")}


def test_liger_delta_within_the_clip_range():
    """The clipped term has a gradient where delta < ratio < 1 + eps_high and A < 0.

    Liger's backward has none there (grpo_loss.py:497, at the sequence level 397); TRL's and ours
    do.
    """
    logits, ids, mask, old, _, A = batch()
    leaves = [logits.clone().requires_grad_(), logits.clone().requires_grad_()]
    exact, options = logits.double().requires_grad_(), {"epsilon_high": 0.4, "delta": 1.05}
    theirs = liger_loss(leaves[0] * 1, delta=1.05)
    ours = reference_loss(leaves[1], call=grpo_loss, **options)
    truth = reference_loss(exact, **options)
    pairs = zip((theirs, ours, truth), (*leaves, exact), strict=True)
    grad, our_grad, true = (torch.autograd.grad(loss, x)[0][:, :-1] for loss, x in pairs)
    assert relative_error(theirs.detach(), truth.detach()) <= 2e-6
    assert relative_error(our_grad, true) <= 3e-6
    ratio = (logps_of(logits, ids) - old).exp()
    lost = mask & (A[:, None] < 0) & (ratio > 1.05) & (ratio < 1.4)
    assert lost.sum() > 1 and (true.norm(dim=-1)[lost] > 0).all()
    assert relative_error(grad, true * ~lost[..., None]) <= 3e-6 and finding_kinds() == set()


def test_liger_grpo_is_ours_of_a_head():
    _, ids, mask, old, ref, A = batch()

    def theirs(h, w):
        return liger_loss(F.pad(h @ w.T, (0, 0, 0, 1)), beta=0.1)

    def ours(h, w, call=fused_grpo_loss, **kwargs):
        cfg = GRPOLossConfig(epsilon_high=0.4, beta=0.1, use_bias_correction_kl=False)
        head = LMHead(w, temperature=TEMPERATURE)
        return call(h, head, ids, A, mask, old_logps=old, ref_logps=ref, config=cfg, **kwargs).loss

    def plain(h, w):
        return ours(h, w, reference.fused_grpo_loss)

    # Ratios are far from 1 here, and log-probs of -40 are rounded.
    kwargs = {"tolerance": 1e-5}
    operands = (torch.randn(B, T, 24) / 24**0.5, torch.randn(V, 24))
    actual = compare(theirs, plain, *operands, **kwargs)
    our_grads = compare(lambda h, w: ours(h, w, execution=TRITON), plain, *operands, **kwargs)
    assert all(relative_error(a, b) <= 1e-5 for a, b in zip(actual, our_grads, strict=True))


def liger(name):
    return pytest.importorskip(f"liger_kernel.ops.{name}")


def test_liger_selective_log_softmax():
    logits, ids, mask, *_ = batch()
    logps = liger("grpo_loss").fused_selective_log_softmax(logits, ids, TEMPERATURE, mask)
    true = logps_of(logits.double(), ids)
    assert (logps - true)[mask].abs().max() <= 2e-6 and finding_kinds() == set()


def test_liger_softmax():
    apply = liger("softmax").LigerSoftmaxFunction.apply
    compare(apply, lambda x: x.softmax(-1), torch.randn(6, V))


def test_liger_rms_norm():
    apply = liger("rms_norm").LigerRMSNormFunction.apply

    def plain(x, w):
        return x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * w

    operands = (torch.randn(6, 200), torch.randn(200))
    compare(lambda x, w: apply(x, w, 1e-6, 0.0, "llama", False), plain, *operands)


def test_liger_cross_entropy():
    apply = liger("cross_entropy").LigerCrossEntropyFunction.apply
    targets = torch.randint(V, (7,))
    targets[2] = -100

    # utils.py:143: what is behind the last column comes in as whatever the hardware gives.
    known = {(WITHOUT_OTHER, "element_mul_kernel")}
    plain = lambda x: F.cross_entropy(x, targets)  # noqa: E731
    compare(lambda x: apply(x * 1, targets, None)[0], plain, torch.randn(7, V), known=known)


@pytest.mark.parametrize("masked", (False, True), ids=("all", "masked rows"))
def test_trl_log_probs_and_entropy(masked):
    kernels = pytest.importorskip("trl.kernels.logprob_entropy")
    logits, ids, mask, *_ = batch()
    mask = mask if masked else torch.ones_like(mask)

    def theirs(x):
        args = (x[:, :-1], ids, TEMPERATURE, *([mask] if masked else []))
        return torch.stack(kernels.selective_log_softmax_and_entropy(*args))

    def plain(x):
        logps = (x[:, :-1] / TEMPERATURE).log_softmax(-1)
        return torch.stack((logps_of(x, ids), -(logps.exp() * logps).sum(-1))) * mask

    # logprob_entropy.py:122: what is behind the last column comes in as the hardware gives it.
    compare(theirs, plain, logits, known={(WITHOUT_OTHER, "_backward_kernel")})


def test_trl_chunked_log_probs_are_ours(monkeypatch):
    kernels = pytest.importorskip("trl.kernels.chunked_logprob")
    monkeypatch.setattr(kernels, "_use_triton", lambda device: True)
    ids = torch.randint(V, (11,))

    def theirs(*head):
        out = kernels.ChunkedLogProbFunction.apply(*head, ids, TEMPERATURE, 400, 9.0)
        return torch.stack(out[:2])

    def ours(h, w, b, call=linear_logprobs, **kwargs):
        out = call(h, LMHead(w, b, temperature=TEMPERATURE, softcap=9.0), ids, **kwargs)
        return torch.stack((out.logps, out.entropy))

    def plain(*head):
        return ours(*head, reference.linear_logprobs)

    def fused(*head):
        return ours(*head, entropy=True, execution=TRITON)

    head = (torch.randn(11, 24), torch.randn(V, 24), torch.randn(V))
    pairs = zip(compare(theirs, plain, *head), compare(fused, plain, *head), strict=True)
    assert all(relative_error(a, b) <= 3e-6 for a, b in pairs)
    assert EmulatedDriver.settings.launches["_forward_kernel"] >= 3


@pytest.mark.parametrize("beta", (0.0, 0.5, 1.0))
def test_trl_chunked_divergence(beta, monkeypatch):
    kernels = pytest.importorskip("trl.kernels.chunked_divergence")
    monkeypatch.setattr(kernels, "_use_triton", lambda device: True)
    monkeypatch.setattr(kernels, "VOCAB_CHUNK_SIZE", 400)
    (function,) = (x for name, x in vars(kernels).items() if name.endswith("DivergenceFunction"))
    teacher, head = torch.randn(7, 24) / 2, torch.randn(V, 24)

    def theirs(h, w):
        return function.apply(h, w, None, teacher, head, None, beta)[0]

    def plain(h, w):
        s = (h @ w.T).log_softmax(-1)
        t = (teacher.double() @ head.double().T).log_softmax(-1)
        if beta in (0, 1):
            p, q = (s, t) if beta else (t, s)
            return (p.exp() * (p - q)).sum(-1)
        m = (beta * t.exp() + (1 - beta) * s.exp()).log()
        return beta * (t.exp() * (t - m)).sum(-1) + (1 - beta) * (s.exp() * (s - m)).sum(-1)

    student = (torch.randn(7, 24) / 2, torch.randn(V, 24))
    compare(theirs, plain, *student, tolerance=5e-6)
