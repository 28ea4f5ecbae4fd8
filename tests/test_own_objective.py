"""A loss of the user's own in place of a loss type: a class, or a callable on per-token tensors."""

from dataclasses import dataclass, replace

import pytest
import torch

from grpo_kernels import Execution, GRPOLossConfig, grpo_loss
from grpo_kernels.loss.losses import Clip, Gmpo, Loss
from grpo_kernels.loss.metrics import TAKEN, TAKEN_PREFIXES
from grpo_kernels.training import parse_config
from tests.helpers.batches import make_batch, relative_error, run_fused
from tests.helpers.head_options import BACKENDS, expect_equal, watch_products
from tests.helpers.tiers import in_turn
from tests.helpers.trainer_runs import config_of, rows_of, trainer_of


@dataclass(frozen=True)
class Dro(Loss):
    """`-(A l - tau / 2 (l - l_old)^2)`; tokens of advantage 0 are pulled back, too."""

    tau: float = 0.5
    token_local = True

    def per_token(self, tokens):
        penalty = self.tau / 2 * tokens.log_ratio.square()
        return penalty - tokens.advantages * tokens.logps

    def metrics(self, tokens, ratio):
        return {"dro/distance": tokens.log_ratio.abs()}


def clipped(tokens):
    A = tokens.advantages
    return -torch.minimum(tokens.ratio * A, tokens.ratio.clamp(0.8, 1.2) * A)


def sequence_clipped(tokens):
    ratio = tokens.sequence_mean(tokens.log_ratio).exp()
    A = tokens.advantages
    return -torch.minimum(ratio * A, ratio.clamp(0.8, 1.2) * A)


def entropy_scaled(tokens):
    return -tokens.advantages * tokens.logps * tokens.entropy.detach() - 0.1 * tokens.entropy


def saying(function, **claims):
    """The same function, which says this of itself."""

    def loss(tokens):
        return function(tokens)

    vars(loss).update(claims)
    return loss


# Values and gradients


@dataclass(frozen=True, kw_only=True)
class OwnRatio(Clip):
    """A ratio that moves half as far, and within bounds."""

    def log_ratio(self, tokens):
        return (0.5 * super().log_ratio(tokens)).clamp(-0.3, 0.3)


class Pulled:
    """A mixin with a formula, in which advantage 0 has a gradient."""

    def per_token(self, tokens):
        return super().per_token(tokens) + 0.1 * tokens.log_ratio.square()


@dataclass(frozen=True, kw_only=True)
class Mixed(Pulled, Clip):
    pass


@dataclass(frozen=True, kw_only=True)
class OfTheCall(Clip):
    """Looks at all tokens of the call."""

    def per_token(self, tokens):
        return super().per_token(tokens) * tokens.log_ratio.exp().mean()


SAYS = {"token_local": True, "gradient_needs_advantage": True, "aggregation": "grpo"}
# Losses, and whether one pass is enough.
LOSSES = {
    "class": (Dro(), True),
    "own ratio": (OwnRatio(), False),
    "mixed": (Mixed(), False),
    "mixed, of sequences": (Mixed(ratio_level="sequence"), False),
    "of the call": (OfTheCall(), False),
    "needs advantage": (saying(clipped, **SAYS), True),
    "callable of sequences": (sequence_clipped, False),
    "entropy": (entropy_scaled, False),
    "entropy in one pass": (
        saying(entropy_scaled, token_local=True, entropy_gradient=True), True
    ),
}  # fmt: skip


@pytest.mark.parametrize(("name", "beta", "backend"), in_turn(LOSSES, (0.0, 0.2), BACKENDS))
def test_equals_the_reference(name, beta, backend, monkeypatch):
    """Whatever chunks there are; the gradient is autograd's, that of the KL too."""
    batch, (loss, one_pass) = make_batch(B=6, T=11), LOSSES[name]
    cfg = GRPOLossConfig(loss_type=loss, beta=beta, use_bias_correction_kl=True)
    (V, H), logits = batch.weight.shape, []

    def product(a, b):
        logits.extend([len(a) * b.shape[1]] if a.shape[1] == H else ())
        return a @ b

    watch_products(monkeypatch, product)
    execution = Execution(backend=backend, chunk_bytes=4 * V * 5)
    options = {"config": cfg, "old_logps": True, "ref_logps": True}
    actual = expect_equal(batch, options, execution=execution)
    monkeypatch.undo()
    assert cfg.one_pass == one_pass == (sum(logits) == int(batch.mask.sum()) * V)
    if isinstance(loss, Clip):
        parent = replace(cfg, loss_type=Clip(ratio_level=loss.ratio_level))
        theirs = run_fused(batch, exact=True, **{**options, "config": parent}).gradients["hidden"]
        assert relative_error(actual.gradients["hidden"], theirs) > 1e-3


def test_a_callable_says_its_aggregation_and_what_needs_no_gradient():
    cfg = GRPOLossConfig(loss_type=saying(clipped, **SAYS))
    assert cfg.effective_aggregation == "grpo" and cfg.gradient_needs_advantage
    assert not GRPOLossConfig(loss_type=clipped).gradient_needs_advantage
    assert GRPOLossConfig(loss_type=LOSSES["entropy in one pass"][0]).entropy_has_gradient


def test_claims_of_a_formula_are_not_inherited_by_another():
    class Restated(Pulled, Clip):
        token_local = True

    for loss in (OwnRatio(), Mixed(), OfTheCall(), Restated()):
        assert loss.token_local == isinstance(loss, Restated)
        assert not loss.gradient_needs_advantage and loss.kernel() is None


@pytest.mark.usefixtures("real_memory")
def test_a_trainer_trains_what_the_loss_trains(tiny_model, tmp_path):
    """In the second update tokens of groups with equal rewards have moved, and are pulled back."""
    halves = {"noise": lambda prompts, completions, **_: [0, 1, 2, 3, 1, 1, 1, 1] * 2}
    moves = []
    for place, (skip, loss) in enumerate((
        (False, Dro()), (True, Dro()), (True, saying(Dro(), gradient_needs_advantage=True)),
    )):  # fmt: skip
        options = {"loss_type": loss, "minibatches": 2, "skip_untrained": skip, "name": f"t{place}"}
        trainer = trainer_of(config_of(tiny_model, tmp_path, steps=1, **options), rewards=halves)
        parameters = [*trainer.policy.parameters()]
        before = torch.cat([p.detach().flatten() for p in parameters])
        assert rows_of(trainer.train())[0]["groups_equal"] == 0.5
        moves.append(torch.cat([p.detach().flatten() for p in parameters]) - before)
    full, masked, lost = moves
    assert full.norm() > 0 and relative_error(masked, full) < 1e-4
    assert relative_error(lost, full) > 1e-2


def test_masked_tokens_are_zeros_and_stay_out():
    seen = []

    def objective(tokens):
        seen.append(tokens)
        # 0 where masked: its logarithm is -inf, its square root has an infinite slope.
        return tokens.logps * (1 + (-tokens.old_logps).log().detach())

    batch = make_batch()
    old = -batch.old_logps.abs()
    logps = old.masked_fill(~batch.mask, 0.0).requires_grad_()
    cfg = GRPOLossConfig(loss_type=objective)
    out = grpo_loss(logps, batch.advantages, batch.mask, old_logps=old, config=cfg)
    out.loss.backward()
    assert out.loss.isfinite() and logps.grad.isfinite().all()
    flat = ~batch.mask.flatten()
    for x in (seen[0].logps, seen[0].old_logps, seen[0].advantages, seen[0].mask):
        assert x.shape == flat.shape and (x[flat] == 0).all()


@pytest.mark.usefixtures("real_memory")
def test_own_metrics_come_through_a_trainer(tiny_model, tmp_path):
    """A prefix hides none of them, and every other name of a row is taken."""
    values = {"ce_gap": 2.0, "ratio": 3.0, "square": 4.0, "scored": 5.0}

    class Own(Loss):
        token_local = gradient_needs_advantage = True

        def per_token(self, tokens):
            return -tokens.advantages * tokens.logps

        def metrics(self, tokens, ratio):
            return {name: torch.full_like(ratio, x) for name, x in values.items()}

    options = {"loss_type": Own(), "steps": 1, "beta": 0.1, "top_entropy_quantile": 0.5}
    (row,) = rows_of(trainer_of(config_of(tiny_model, tmp_path, **options)).train())
    assert {name: row[name] for name in values} == values
    others = row.keys() - values
    assert {"grad_norm", "tokens", "groups_equal", "kl_max"} <= others
    assert [x for x in others if x not in TAKEN and not x.startswith(TAKEN_PREFIXES)] == []


# By name, in a run's options
@pytest.mark.parametrize(
    ("flags", "loss"),
    (
        (("--loss_type", f"{__name__}:Dro"), Dro(tau=0.25)),
        (("--loss_type", "gmpo", '--loss_options={"epsilon": 0.3}'), Gmpo(epsilon=0.3)),
    ),
)
def test_a_loss_by_its_name_is_that_of_its_instance(flags, loss, tiny_model, tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(f"model: {tiny_model}\nloss_options:\n  tau: 0.25\n")
    named = parse_config([str(path), *flags])
    assert named.loss == loss and named.loss_config() == GRPOLossConfig(loss_type=loss)
    function = config_of(tiny_model, tmp_path, loss_type=f"{__name__}:sequence_clipped")
    assert function.loss_config().loss.function is sequence_clipped
