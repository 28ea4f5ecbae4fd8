"""A loss of the user's own in place of a loss type: a class, or a callable on per-token tensors."""

from dataclasses import dataclass, replace

import pytest
import torch

from grpo_kernels import Execution, GRPOLossConfig, grpo_loss
from grpo_kernels.loss.losses import Clip, Gmpo, Loss, Sapo, option
from grpo_kernels.loss.metrics import TAKEN, TAKEN_PREFIXES
from grpo_kernels.training import parse_config
from tests.helpers.batches import config, make_batch, packed, relative_error, run_fused
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


def own_loss(**members):
    """A loss that is plain REINFORCE but for these members of its class."""
    plain = {"token_local": True, "per_token": lambda self, t: -t.advantages * t.logps}
    return type("Own", (Loss,), plain | members)()


# Values and gradients


def test_a_new_loss():
    """Value, gradient and metric are the formula's, in which advantage 0 has a gradient."""
    logps, old, A = torch.randn(3, 2, 6, generator=torch.Generator().manual_seed(2))
    mask, A[:, 3] = torch.arange(12).view(2, 6) % 5 > 0, 0.0
    cfg = GRPOLossConfig(loss_type=Dro(tau=0.7))
    out = grpo_loss(logps.requires_grad_(), A, mask, old_logps=old, config=cfg)
    (-2.0 * out.loss).backward()
    d = (logps - old)[mask].detach()
    loss = (0.35 * d**2 - (A * logps)[mask]).mean()
    torch.testing.assert_close(out.loss, loss)
    torch.testing.assert_close(logps.grad[mask] / -2.0, (0.7 * d - A[mask]) / len(d))
    torch.testing.assert_close(out.metrics["dro/distance"], d.abs().mean())
    assert (logps.grad[~mask] == 0).all() and (A[mask] == 0).any()


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
    "class of a callable": (saying(Dro(), token_local=True), True),
    "own ratio": (OwnRatio(), False),
    "own ratio of sequences": (OwnRatio(ratio_level="sequence"), False),
    "mixed": (Mixed(), False),
    "mixed, of sequences": (Mixed(ratio_level="sequence"), False),
    "of the call": (OfTheCall(), False),
    "of the call's sequences": (OfTheCall(ratio_level="sequence"), False),
    "needs advantage": (saying(clipped, **SAYS), True),
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

    class Named(Clip):
        aggregation = "bnpo"

    for loss in (OwnRatio(), Mixed(), OfTheCall()):
        assert not loss.token_local and not loss.gradient_needs_advantage and loss.kernel() is None
        assert type(loss).closed_form is Loss.closed_form
    assert Restated().token_local and not Restated().gradient_needs_advantage
    assert Named().token_local and Named().kernel() == Clip().kernel() is not None
    assert Restated.closed_form is Loss.closed_form and Named.closed_form is Clip.closed_form


@pytest.mark.parametrize("layout", ("padded", "packed"))
@pytest.mark.parametrize("aggregation", ("grpo", "bnpo", "dr_grpo", "dapo", "luspo"))
@pytest.mark.parametrize(
    "loss", (clipped, saying(clipped, **SAYS), sequence_clipped), ids=("token", "local", "sequence")
)
def test_equals_the_built_in_one(loss, aggregation, layout):
    """In one pass with what needs no gradient left out, where it says so; in two otherwise."""
    batch = make_batch(B=6, T=11)
    batch = packed(batch) if layout == "packed" else batch
    shared = {"beta": 0.1, "is_correction": "token_truncate", "entropy_coef": 0.01}
    tensors = dict.fromkeys(("old_logps", "ref_logps", "sampling_logps"), True)
    own = config(loss_type=loss, aggregation=aggregation, **shared)
    built_in = config(loss_type=aggregation, **shared)
    if loss is sequence_clipped:
        built_in = config(loss_type="gspo", aggregation=aggregation, **shared)
        # The KL of the callable's config is corrected by the token's ratio.
        own, built_in = (replace(x, use_bias_correction_kl=False) for x in (own, built_in))
    assert own.one_pass == (loss not in (clipped, sequence_clipped))
    a = run_fused(batch, exact=False, config=own, **tensors)
    b = run_fused(batch, exact=True, config=built_in, **tensors)
    assert a.loss.item() == pytest.approx(b.loss.item(), rel=1e-5)
    for name in ("hidden", "weight"):
        assert relative_error(a.gradients[name], b.gradients[name]) <= 2e-5


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
    loss = own_loss(
        metrics=lambda self, tokens, r: {k: torch.full_like(r, x) for k, x in values.items()},
        gradient_needs_advantage=True,
    )
    logps, zeros, ones = torch.randn(2, 3), torch.zeros(2, 3), torch.ones(2, 3)
    cfg = GRPOLossConfig(loss_type=loss)
    tensors = {"old_logps": zeros, "sampling_logps": zeros, "ce_weights": ones}
    metrics = grpo_loss(logps, ones, **tensors, config=cfg).metrics
    assert {name: float(metrics[name]) for name in values} == values
    x = logps.double().exp()
    assert float(metrics["ess"]) == pytest.approx(float(x.sum() ** 2 / (6 * x.square().sum())))
    options = {"loss_type": loss, "steps": 1, "beta": 0.1, "top_entropy_quantile": 0.5}
    (row,) = rows_of(trainer_of(config_of(tiny_model, tmp_path, **options)).train())
    assert {name: row[name] for name in values} == values
    others = row.keys() - values
    assert {"grad_norm", "tokens", "groups_equal", "kl_max"} <= others
    assert [x for x in others if x not in TAKEN and not x.startswith(TAKEN_PREFIXES)] == []


# What is refused


@dataclass(frozen=True)
class Ranged(Loss):
    tau: float = option(0.1, "in [0, 2]")

    def per_token(self, tokens):
        return -self.tau * tokens.advantages * tokens.logps


# Losses, and what their config says of them.
WRONG_LOSSES = (
    (Ranged, ValueError, r"option\(\) of Ranged.tau: expected one of > 0, .*; got 'in \[0, 2\]'"),
    (Loss, TypeError, r"expected a per_token\(\) of Loss, .*; got none"),
    (lambda: own_loss(ratio_level="word"), ValueError, "ratio_level: expected one of token, seq"),
    (lambda: own_loss(token_gradient=1), TypeError, "token_gradient: expected a bool; got 1"),
    (lambda: own_loss(needs_sequences="x"), TypeError, "needs_sequences: expected a bool; got 'x'"),
    (lambda: own_loss(aggregation="sum"), ValueError, "aggregation: expected one of grpo, bnpo"),
)
# Callables, and what both calls say of them.
WRONG_CALLABLES = (
    (lambda t: t.logps.sum(), ValueError, r"<lambda>\(\): expected shape \[36\]; got \[\]"),
    (lambda t: 1.0, TypeError, r"<lambda>\(\): expected a tensor; got float"),
    (lambda t: t.logps + 0j, TypeError, r"<lambda>\(\): expected dtype .*; got complex64"),
    (lambda t: t.advantages, ValueError,
     r"<lambda>\(\): expected a gradient for tokens.logps or .*; got none"),
    (saying(entropy_scaled, token_local=True), ValueError,
     ".* token_local=True .* needs entropy_gradient=True"),
    (saying(sequence_clipped, token_local=True), ValueError,
     ".* token_local=True must not use other tokens"),
)  # fmt: skip
# Wrong results of a method for 6 tokens, and the error.
WRONG_RESULTS = (
    ("per_token", lambda t: t.logps.sum(), ValueError, r"\(\): expected shape \[6\]; got \[\]"),
    ("per_token", lambda t: None, TypeError, r"\(\): expected a tensor; got NoneType"),
    ("log_ratio", lambda t: t.logps[:1], ValueError, r"\(\): expected shape \[6\]; got \[1\]"),
    ("clipped", lambda t: t.logps > 1, TypeError, r"\(\): expected a pair, .*; got Tensor"),
    ("clipped", lambda t: None, TypeError, r"\(\): expected a pair, .*; got NoneType"),
    ("clipped", lambda t: (None, 1), TypeError, r"\(\)\[1\]: expected a tensor; got int"),
    ("clipped", lambda t: (t.logps.sum() > 1, None), ValueError, r"\(\)\[0\]: expected shape"),
    ("metrics", lambda t: {"x": 1.0}, TypeError, r"\(\)\['x'\]: expected a tensor; got float"),
    ("metrics", lambda t: {"x": t.logps.mean()}, ValueError, r"\(\)\['x'\]: expected shape \[6\]"),
    ("metrics", lambda t: t.logps, TypeError, r"\(\): expected a dict of tensors by name"),
    ("metrics", lambda t: {1: t.logps}, TypeError, r"\(\): expected a dict of tensors by name"),
    ("metrics", lambda t: {"": t.logps}, TypeError, r"\(\): expected a dict of tensors by name"),
    *(
        ("metrics", lambda t, name=name: {"mine": t.logps, name: t.logps}, ValueError,
         rf"\(\): expected names other than .*tokens, .*; got '{name}'")
        for name in ("tokens", "ratio_mean", "ce_nll", "kl", "loss", "reward/noise")
    ),
)  # fmt: skip


@pytest.mark.parametrize(("loss", "error", "message"), WRONG_LOSSES)
def test_a_class_that_is_no_loss_is_named(loss, error, message):
    with pytest.raises(error, match=rf"^loss_type(: |\.){message}"):
        GRPOLossConfig(loss_type=loss())


@pytest.mark.parametrize(("loss", "error", "message"), WRONG_CALLABLES)
def test_a_callable_that_is_no_loss_is_named(loss, error, message):
    batch, cfg = make_batch(), GRPOLossConfig(loss_type=loss)
    with pytest.raises(error, match=f"^loss_type: {message}"):
        run_fused(batch, exact=False, config=cfg)
    logps, entropy = (torch.zeros(4, 9, requires_grad=True) for _ in range(2))
    with pytest.raises(error, match=f"^loss_type: {message}"):
        grpo_loss(logps, batch.advantages, batch.mask, entropy=entropy, config=cfg)


@pytest.mark.parametrize(("method", "result", "error", "message"), WRONG_RESULTS)
def test_what_a_method_returns_is_checked(method, result, error, message):
    loss = own_loss(**{method: lambda self, tokens, *ratio: result(tokens)})
    logps = torch.zeros(2, 3, requires_grad=True)
    with pytest.raises(error, match=rf"^loss_type: Own\.{method}{message}"):
        grpo_loss(logps, torch.ones(2), config=GRPOLossConfig(loss_type=loss))


# By name, in a run's options


@pytest.mark.parametrize(
    ("loss_type", "loss_options", "loss"),
    (
        (f"{__name__}:Dro", {"tau": 2}, Dro(tau=2)),
        ("sapo", {"temperature_neg": 1.3}, Sapo(temperature_neg=1.3)),
    ),
)
def test_a_loss_by_its_name_is_that_of_its_instance(
    loss_type, loss_options, loss, tiny_model, tmp_path
):
    named = config_of(tiny_model, tmp_path, loss_type=loss_type, loss_options=loss_options)
    instance = config_of(tiny_model, tmp_path, loss_type=loss)
    assert named.loss_config() == instance.loss_config() == GRPOLossConfig(loss_type=loss)
    assert not named.why_two_passes()


def test_a_callable_by_its_name(tiny_model, tmp_path):
    named = config_of(tiny_model, tmp_path, loss_type=f"{__name__}:sequence_clipped")
    assert named.loss_config().loss.function is sequence_clipped
    assert named.loss_config().why_two_passes()


def test_a_loss_comes_from_a_file_of_options(tmp_path, tiny_model):
    path = tmp_path / "run.yaml"
    path.write_text(f"model: {tiny_model}\nloss_type: {__name__}:Dro\nloss_options:\n  tau: 0.25\n")
    assert parse_config([str(path)]).loss == Dro(tau=0.25)
    flags = ["--loss_type", "gmpo", '--loss_options={"epsilon": 0.3}']
    assert parse_config([str(path), *flags]).loss == Gmpo(epsilon=0.3)


@pytest.mark.parametrize(
    ("options", "message"),
    (
        ({"loss_type": "no_such:Loss"}, "loss_type: expected module:function; got 'no_such:Loss'"),
        ({"loss_type": f"{__name__}:replace", "loss_options": {"x": 1}}, "loss_options: expected"),
        ({"loss_type": "builtins:dict"}, "loss_type: expected a subclass of Loss; got builtins:"),
        ({"loss_type": f"{__name__}:Dro", "loss_options": {"beta": 1}},
         r"loss_options: expected options of Dro \(tau\); got beta"),
        ({"loss_type": Dro(), "loss_options": {"tau": 1}}, "loss_options=.*work with an instance"),
        ({"loss_options": {"tau": 1}}, r"loss_options: expected options of Clip \(.*; got tau"),
        ({"loss_type": "sapo", "loss_options": {"temperature_neg": "warm"}}, "temperature_neg"),
        ({"loss_options": "tau"}, "loss_options: expected"),
    ),
)  # fmt: skip
def test_a_loss_that_is_none_is_named(options, message, tiny_model, tmp_path):
    with pytest.raises((ValueError, TypeError), match=message):
        config_of(tiny_model, tmp_path, **options)
