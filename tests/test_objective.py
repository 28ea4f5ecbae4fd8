"""The objective against its formulas written out token by token in plain Python."""

import math
import sys
from itertools import product
from statistics import fmean

import pytest
import torch

from grpo_kernels import GRPOLossConfig, grpo_loss, per_token_kl, reference
from grpo_kernels.loss.config import AGGREGATIONS, IS_CORRECTIONS, KL_ESTIMATORS, LOSS_TYPES
from tests.helpers.batches import config, make_batch, relative_error
from tests.helpers.head_options import BACKENDS
from tests.helpers.tiers import cases


def clamp(x, low, high):
    return min(max(x, low), high)


def two_outcomes(q, p):
    """KL(q || p) of a token's probability, beside that of all others."""
    q_rest, p_rest = (max(1 - x, sys.float_info.min) for x in (q, p))  # noise may make x > 1
    return q * math.log(q / p) + q_rest * math.log(q_rest / p_rest)


class ByHand:
    """Nested loops over lists of lists of unmasked tokens, with nothing from the library.

    `fixed` stands for the log-probs wherever the formula has a stop-gradient, so that a
    difference quotient over `logps` alone is the gradient.
    """

    def __init__(self, cfg, fixed, old, ref, roll, advantages, entropy, num_items=None):
        self.cfg, self.fixed, self.ref = cfg, fixed, ref
        self.old = fixed if old is None else old
        self.roll = self.old if roll is None else roll
        self.A, self.entropy, self.num_items = advantages, entropy, num_items
        self.high = cfg.epsilon if cfg.epsilon_high is None else cfg.epsilon_high
        self.threshold = cfg.entropy_threshold
        if self.threshold is not None:
            return
        every = sorted(e for row in entropy for e in row)
        position = (1 - cfg.top_entropy_quantile) * (len(every) - 1)
        below, above = math.floor(position), math.ceil(position)
        self.threshold = every[below] + (position - below) * (every[above] - every[below])

    def loss(self, logps):
        cfg, B = self.cfg, len(logps)
        rows = [[self.token(logps, i, t) for t in range(len(row))] for i, row in enumerate(logps)]
        count = sum(len(row) for row in rows)
        average = cfg.aggregation or {
            "cispo": "dapo", "sapo": "grpo", "vespo": "dapo", "gspo": "grpo", "gspo_token": "grpo",
            "gmpo": "grpo", "reinforce": "dapo", "dppo_tv": "dapo", "dppo_kl": "dapo",
        }.get(cfg.loss_type, cfg.loss_type)  # fmt: skip
        items = self.num_items or (count if average in ("bnpo", "dapo") else B)
        if average == "dr_grpo":
            items *= cfg.max_completion_length
        sums = (fmean(row) if average == "grpo" else sum(row) for row in rows if row)
        loss = sum(sums) / items
        if cfg.entropy_coef:
            chosen = [e for row in self.entropy for e in row if self.chosen(e)]
            loss -= cfg.entropy_coef * fmean(chosen)
        return loss

    def chosen(self, entropy):
        return self.cfg.top_entropy_quantile == 1 or entropy >= self.threshold

    def token(self, logps, i, t):
        cfg, A = self.cfg, self.A[i][t]
        x = self.surrogate(logps, i, t)
        if cfg.off_policy_threshold is not None and A < 0:
            drift = [
                0 if math.isnan(s) else s - f
                for s, f in zip(self.roll[i], self.fixed[i], strict=True)
            ]
            x *= fmean(drift) <= cfg.off_policy_threshold
        x *= self.chosen(self.entropy[i][t])
        if cfg.is_correction != "none" and cfg.loss_type != "vespo":
            x *= self.rho(i, t)
        return x + cfg.beta * self.kl(logps, i, t)

    def ratio(self, logps, i, t):
        cfg = self.cfg
        mean = fmean(a - b for a, b in zip(logps[i], self.old[i], strict=True))
        frozen = fmean(a - b for a, b in zip(self.fixed[i], self.old[i], strict=True))
        if cfg.loss_type == "gspo_token":
            return math.exp(logps[i][t] - self.fixed[i][t] + frozen)
        if cfg.loss_type == "gspo" or cfg.importance_sampling_level == "sequence":
            return math.exp(mean)
        return math.exp(logps[i][t] - self.old[i][t])

    def surrogate(self, logps, i, t):
        cfg, A, logp = self.cfg, self.A[i][t], logps[i][t]
        r, frozen = self.ratio(logps, i, t), self.ratio(self.fixed, i, t)
        if cfg.loss_type in ("grpo", "bnpo", "dr_grpo", "dapo", "luspo", "gspo", "gspo_token"):
            bounded = r if cfg.delta is None else min(r, cfg.delta)
            x = -min(bounded * A, clamp(r, 1 - cfg.epsilon, 1 + self.high) * A)
            return min(x, -cfg.dual_clip * A) if cfg.dual_clip and A < 0 else x
        if cfg.loss_type == "cispo":
            return -min(frozen, cfg.epsilon_high) * A * logp
        if cfg.loss_type == "sapo":
            tau = cfg.sapo_temperature_pos if A > 0 else cfg.sapo_temperature_neg
            return -4 / tau / (1 + math.exp(-tau * (r - 1))) * A
        if cfg.loss_type == "vespo":
            pairs = list(zip(self.fixed[i], self.old[i], strict=True))
            log_w = sum(clamp(a - b, -20, 20) for a, b in pairs)
            if cfg.is_correction != "none":
                rhos = [self.rho(i, s) for s in range(len(pairs))]
                log_w += sum(clamp(math.log(max(w, 1e-8)), math.log(1e-8), 20) for w in rhos)
            log_w = clamp(log_w, math.log(1e-8), 20)
            k = cfg.vespo_k_pos if A >= 0 else cfg.vespo_k_neg
            decay = cfg.vespo_lambda_pos if A >= 0 else cfg.vespo_lambda_neg
            return -math.exp(decay + k * log_w - decay * math.exp(log_w)) * A * logp
        if cfg.loss_type == "gmpo":
            terms = []
            for a, b, other in zip(logps[i], self.old[i], self.A[i], strict=True):
                s, d = (other > 0) - (other < 0), a - b
                terms.append(s * min(s * d, s * clamp(d, -cfg.epsilon, self.high)))
            return -A * math.exp(fmean(terms))
        if cfg.loss_type == "reinforce":
            return -A * logp
        assert cfg.loss_type in ("dppo_tv", "dppo_kl")
        new, old = math.exp(self.fixed[i][t]), math.exp(self.old[i][t])
        moved = new - old
        if cfg.loss_type == "dppo_kl":
            moved = math.copysign(two_outcomes(old, new), moved)
        keep = moved <= self.high if A > 0 else moved >= -cfg.epsilon
        return -A * min(frozen, cfg.dppo_ratio_max) * logp * keep

    def rho(self, i, t):
        cfg = self.cfg
        log_w = [
            0 if math.isnan(s) else o - s for o, s in zip(self.old[i], self.roll[i], strict=True)
        ]
        level, _, way = cfg.is_correction.partition("_")
        over = {"token": lambda x: x[t], "sequence": sum, "geometric": fmean}[level]
        w = math.exp(over(log_w))
        low = 0 if cfg.is_clip_min is None else cfg.is_clip_min
        high = math.inf if cfg.is_clip_max is None else cfg.is_clip_max
        if way == "truncate":
            return clamp(w, low, high)
        pairs = [(math.exp(s), math.exp(o)) for s, o in zip(self.roll[i], self.old[i], strict=True)]
        gates = {"binary_kl": two_outcomes, "tv": lambda q, p: abs(q - p)}
        gate = w
        if cfg.is_gate != "ratio":
            gate = over([0 if math.isnan(q) else gates[cfg.is_gate](q, p) for q, p in pairs])
        return w if low <= gate <= high else 0

    def kl(self, logps, i, t):
        cfg, r = self.cfg, self.ratio(logps, i, t)
        d, fixed = self.ref[i][t] - logps[i][t], self.ref[i][t] - self.fixed[i][t]
        if cfg.kl_clamp:
            d, fixed = clamp(d, -20, 20), clamp(fixed, -20, 20)

        def estimate(name, d):
            kl = {
                "k1": -d, "abs": abs(d), "k2": d * d / 2, "k3": math.exp(d) - d - 1
            }[name]  # fmt: skip
            return clamp(kl, -cfg.kl_clamp, cfg.kl_clamp) if cfg.kl_clamp else kl

        name = cfg.kl_estimator
        if name.endswith("+"):
            kl = estimate(name[:2], fixed) + estimate("k2", d) - estimate("k2", fixed)
        else:
            kl = estimate(name, d)
        return kl * r if cfg.use_bias_correction_kl else kl


def each(**options):
    """Every combination of the values; one that is no tuple goes with all of them."""
    values = (x if isinstance(x, tuple) else (x,) for x in options.values())
    return [dict(zip(options, case, strict=True)) for case in product(*values)]


CLIPPED = (*AGGREGATIONS, "gspo", "gspo_token")
AVERAGED = ("cispo", "sapo", "vespo", "gspo", "gspo_token", "reinforce", "dppo_tv")
CORRECTED = ("dapo", "gspo", "gmpo", "cispo", "sapo", "reinforce", "dppo_tv")
CASES = [
    *each(loss_type=LOSS_TYPES),
    *each(loss_type=LOSS_TYPES, beta=0.1),
    *each(loss_type=(*CLIPPED, "gmpo"), epsilon=0.05, epsilon_high=0.4),
    *each(loss_type=CLIPPED, epsilon=0.6, delta=1.2),
    *each(loss_type=CLIPPED, epsilon=0.6, dual_clip=1.1),
    *each(loss_type=(*CLIPPED, "cispo"), importance_sampling_level="sequence"),
    *each(loss_type=AVERAGED, aggregation=AGGREGATIONS),
    *each(loss_type="dppo_tv", epsilon=0.05, epsilon_high=0.02, dppo_ratio_max=1.1),
    *each(loss_type="dppo_kl", epsilon=0.005, epsilon_high=0.002, dppo_ratio_max=1.1),
    *each(loss_type="sapo", sapo_temperature_pos=2.0, sapo_temperature_neg=0.5),
    *each(
        loss_type="vespo", vespo_k_pos=1.0, vespo_lambda_pos=1.5, vespo_k_neg=2.0,
        vespo_lambda_neg=3.5,
    ),
    *each(use_bias_correction_kl=(True, False), kl_estimator=KL_ESTIMATORS, beta=0.3),
    *each(beta=0.3, kl_estimator=KL_ESTIMATORS, kl_clamp=0.05),
    *each(beta=0.3, loss_type=("gspo", "gspo_token")),
    *each(is_correction=IS_CORRECTIONS[1:], loss_type=CORRECTED, is_clip_max=1.15),
    *each(
        loss_type="vespo", is_correction=("token_truncate", "token_mask"), is_clip_max=1.1,
        is_clip_min=0.9,
    ),
    *each(is_correction=("token_mask", "token_truncate"), is_clip_max=None, is_clip_min=0.9),
    *(
        {"is_correction": f"{level}_mask", "is_gate": gate, "is_clip_max": times * bound}
        for level, bound in (("token", 1e-3), ("sequence", 5e-3), ("geometric", 2e-3))
        for gate, times in (("binary_kl", 1), ("tv", 10))
    ),
    *each(off_policy_threshold=(0.0, 0.03), beta=0.1),
    *each(top_entropy_quantile=0.3, beta=0.1),
    *each(top_entropy_quantile=0.0),
    *each(top_entropy_quantile=0.3, entropy_coef=0.1, entropy_threshold=0.4),
    *each(top_entropy_quantile=0.3, entropy_coef=0.1, loss_type="gspo"),
    *each(entropy_coef=0.1, beta=0.02, loss_type="grpo"),
    *each(
        loss_type="grpo", off_policy_threshold=0.02, top_entropy_quantile=0.6,
        is_correction="token_truncate", is_clip_max=1.1, entropy_coef=0.1, beta=0.1,
    ),
]  # fmt: skip


def name_of(options):
    return "-".join(f"{k}={v}" for k, v in options.items()) or "default"


def unmasked(x, mask):
    """The unmasked tokens of each sequence, as lists."""
    return [row[m].tolist() for row, m in zip(x.double(), mask, strict=True)]


def is_fast(options, policy, advantages_of):
    """Each case off-policy, where bounds make a difference; on-policy each loss."""
    place = CASES.index(options)
    in_turn = advantages_of == ("sequences", "tokens")[place % 2]
    return in_turn and (policy == "off_policy" or place < 2 * len(LOSS_TYPES))


@pytest.mark.parametrize(
    ("options", "policy", "advantages_of"),
    cases(CASES, ("off_policy", "on_policy"), ("sequences", "tokens"), fast=is_fast),
    ids=lambda x: x if isinstance(x, str) else name_of(x),
)
def test_by_hand(options, policy, advantages_of):
    """Value and gradient; with old log-probs and without, advantages per sequence or token."""
    cfg, batch = config(**options), make_batch(B=5, T=7, seed=3)
    g = torch.Generator().manual_seed(3)
    logps = (batch.old_logps + 0.2 * torch.randn(5, 7, generator=g)).double().requires_grad_()
    entropy, advantages = torch.rand(5, 7, generator=g).double(), batch.advantages
    if advantages_of == "tokens":
        advantages = advantages[:, None] + torch.randn(5, 7, generator=g)
    old, num_items = (batch.old_logps, None) if policy == "off_policy" else (None, 31)
    ref, roll = batch.ref_logps, batch.sampling_logps
    uses_sampler = cfg.is_correction != "none" or cfg.off_policy_threshold is not None
    out = reference.grpo_loss(
        logps, advantages, batch.mask, old_logps=old, ref_logps=ref, entropy=entropy,
        sampling_logps=roll if uses_sampler else None, num_items=num_items, config=cfg,
    )  # fmt: skip
    per_token = advantages.reshape(5, -1).expand(5, 7)
    lists, *constants = (
        x if x is None else unmasked(x, batch.mask)
        for x in (logps, old, ref, roll, per_token, entropy)
    )
    by_hand = ByHand(cfg, lists, *constants, num_items)
    assert out.loss.item() == pytest.approx(by_hand.loss(lists), rel=1e-9, abs=1e-12)

    out.loss.backward()
    expected, step = torch.zeros(5, 7, dtype=torch.float64), 1e-6
    for i, row in enumerate(batch.mask):
        for j, t in enumerate(row.nonzero()[:, 0].tolist()):
            moved = [[list(x) for x in lists] for _ in range(2)]
            moved[0][i][j] += step
            moved[1][i][j] -= step
            expected[i, t] = (by_hand.loss(moved[0]) - by_hand.loss(moved[1])) / (2 * step)
    assert expected.norm() > 0 and (logps.grad[~batch.mask] == 0).all()
    assert relative_error(logps.grad, expected) <= 1e-6


def gradients_of(cfg, logps, advantages, batch):
    """Returns float64 gradients of log-probs and entropy; None where there is none."""
    leaf = logps.clone().requires_grad_()
    entropy = torch.ones_like(leaf).requires_grad_()
    out = reference.grpo_loss(
        leaf, advantages, batch.mask, old_logps=batch.old_logps, ref_logps=batch.ref_logps,
        entropy=entropy, config=cfg,
    )  # fmt: skip
    return torch.autograd.grad(out.loss, (leaf, entropy), allow_unused=True)


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_what_a_class_says_is_what_autograd_says(loss_type):
    """Autograd confirms which losses are token-local, need an advantage, or use the entropy."""
    cfg, batch = config(loss_type=loss_type), make_batch(B=6, T=11)
    g = torch.Generator().manual_seed(5)
    logps = (batch.old_logps + 0.1 * torch.randn(6, 11, generator=g)).double()
    advantages = torch.randn(6, 11, generator=g)
    if cfg.one_pass:  # otherwise whole sequences are without one
        advantages[:, ::2] = 0.0
    advantages[3] = 0.0
    before, d_entropy = gradients_of(cfg, logps, advantages, batch)
    without = batch.mask & (advantages == 0)
    assert (before[without] == 0).all() == cfg.gradient_needs_advantage
    assert without.any() and (before[batch.mask & (advantages != 0)] != 0).any()
    assert (d_entropy is not None) == cfg.entropy_has_gradient
    kl = config(loss_type=loss_type, beta=0.1)
    d_logps, _ = gradients_of(kl, logps, advantages, batch)
    assert (d_logps[without] != 0).any() and not kl.gradient_needs_advantage

    logps[:, 1] += 0.01
    after, _ = gradients_of(cfg, logps, advantages, batch)
    other_tokens = batch.mask.clone()
    other_tokens[:, 1] = False
    assert torch.equal(before[other_tokens], after[other_tokens]) == cfg.one_pass


def test_off_policy_by_old_logps():
    """The old policy stands in for a sampler whose log-probs are not known."""
    old = torch.zeros(3, 2)
    logps = torch.tensor([[-0.1, -0.5], [-0.1, -0.1], [-0.5, -0.5]], requires_grad=True)
    advantages = torch.tensor([-1.0, -1.0, 1.0])
    cfg = config(off_policy_threshold=0.2, loss_type="reinforce")
    out = grpo_loss(logps, advantages, old_logps=old, config=cfg)
    out.loss.backward()
    assert (logps.grad[0] == 0).all() and (logps.grad[1:] != 0).all()
    assert out.metrics["off_policy_dropped"].item() == pytest.approx(1 / 3)


@pytest.mark.parametrize("estimator", KL_ESTIMATORS)
def test_kl_clamp_keeps_the_log_ratio_within_20(estimator):
    """The clamp turns d = 30 into 20, without a gradient, before any exp."""
    logps = torch.tensor([[-31.0, -1.0, -1.0]], requires_grad=True)
    ref = torch.tensor([[-1.0, -31.0, -1.5]])
    cfg = config(
        beta=1.0, kl_estimator=estimator, kl_clamp=1e30, use_bias_correction_kl=False,
        loss_type="reinforce",
    )  # fmt: skip
    out = grpo_loss(logps, torch.zeros(1), ref_logps=ref, config=cfg)
    out.loss.backward()
    assert (logps.grad[0, :2] == 0).all() and logps.grad[0, 2] != 0
    kl = per_token_kl(logps.detach(), ref, estimator=estimator, clamp=1e30)[0]
    values = {"k1": (-20, 20), "abs": (20, 20), "k2": (200, 200)}
    expected = values.get(estimator.rstrip("+"), (math.exp(20) - 21, math.exp(-20) + 19))
    assert kl[:2].tolist() == pytest.approx(expected, rel=1e-5)
    assert out.loss.item() == pytest.approx(kl.mean().item(), rel=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_log_ratio_ends_at_80(backend):
    """The ratio of e^100, infinite in float32, is e^80 and has no gradient."""
    logps = torch.tensor([[-1.0, -1.0]], requires_grad=True)
    old = torch.tensor([[-101.0, -1.5]])
    out = grpo_loss(
        logps, torch.tensor([-1.0]), old_logps=old, config=config(loss_type="dapo"),
        backend=backend,
    )  # fmt: skip
    out.loss.backward()
    assert out.metrics["ratio_max"].item() == pytest.approx(math.exp(80), rel=1e-5)
    assert out.loss.item() == pytest.approx(math.exp(80) / 2, rel=1e-5)
    assert logps.grad[0, 0] == 0
    assert logps.grad[0, 1].item() == pytest.approx(math.exp(0.5) / 2, rel=1e-5)


def test_vespo_log_weight_ends_at_20():
    """Bounds per token and per sequence, seen with a decay that lets so large a weight count."""
    cfg = config(loss_type="vespo", vespo_k_pos=0.5, vespo_lambda_pos=1e-9)
    for log_ratios, log_w in (([25.0], 20), ([15.0, 15.0], 20), ([25.0, -8.0], 12)):
        old = torch.full((1, len(log_ratios)), -40.0)
        logps = old + torch.tensor([log_ratios])
        out = reference.grpo_loss(logps.double(), torch.ones(1), old_logps=old, config=cfg)
        phi = math.exp(1e-9 + 0.5 * log_w - 1e-9 * math.exp(log_w))
        assert out.metrics["vespo/phi_seq_mean"].item() == pytest.approx(phi, rel=1e-6)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("d", (1e-4, -3e-3, 0.2, -0.24, 0.26, 3.0))
def test_kl_near_zero_keeps_its_digits(d, backend):
    """e^d - d - 1 in float32 has none left at d = 1e-4."""
    ref = torch.full((1, 1), d)
    cfg, zero = GRPOLossConfig(beta=1.0), torch.zeros(1, 1)
    out = grpo_loss(zero, zero[0], ref_logps=ref, config=cfg, backend=backend)
    d, rel = ref.item(), 1e-3 if abs(d) < 1e-2 else 1e-5
    for value in (out.loss, out.metrics["kl"]):
        assert value.item() == pytest.approx(math.expm1(d) - d, rel=rel)
