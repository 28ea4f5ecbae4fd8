"""The options `GRPOLossConfig` refuses, and its answers about passes and sequences."""

import inspect
import pickle
from dataclasses import dataclass, fields, replace
from functools import partial

import pytest

from grpo_kernels import GRPOLossConfig
from grpo_kernels.loss.losses import LOSS_TYPES, Cispo, Clip, Loss, Sapo, Vespo, flat_fields
from tests.helpers.batches import config


def own(**claims):
    """A callable that says this of itself."""

    def loss(tokens):
        return tokens.logps

    vars(loss).update(claims)
    return loss


@dataclass(frozen=True)
class Checked(Loss):
    flag: bool = True


CISPO = {"loss_type": "cispo", "epsilon_high": 5.0}
MASK = {"is_correction": "token_mask"}
WRONG_VALUES = {
    "loss_type: expected one of grpo, bnpo, .*got 'ppo'": {"loss_type": "ppo"},
    r"loss_type: .*; got 'GRPO': did you mean grpo\?$": {"loss_type": "GRPO"},
    r"loss_type: .*; got 'dr-grpo': did you mean dr_grpo\?$": {"loss_type": "dr-grpo"},
    r"loss_type: .*; got 'Dr. GRPO': did you mean dr_grpo\?$": {"loss_type": "Dr. GRPO"},
    r"kl_estimator: .*; got 'K3\+': did you mean k3\+\?$": {"kl_estimator": "K3+"},
    "is_correction: expected one of none, .*'token'$": {"is_correction": "token"},
    "aggregation: expected one of": {"aggregation": "mean", "loss_type": "cispo"},
    "dual_clip: expected a number > 1; got 1.0": {"dual_clip": 1.0},
    "kl_clamp: expected a number > 0; got 0.0": {"kl_clamp": 0.0},
    "kl_estimator='exact' has no effect with beta=0: set beta": {"kl_estimator": "exact"},
    "off_policy_threshold: .* >= 0; got -0.1": {"off_policy_threshold": -0.1},
    "vespo_k_pos: .* > 0; got 0.0": {"vespo_k_pos": 0.0, "loss_type": "vespo"},
    "kl_estimator: expected one of k1, .*got 'k9'": {"kl_estimator": "k9"},
    "importance_sampling_level: .*; got 'word'": {"importance_sampling_level": "word"},
    "beta: expected a number >= 0; got -0.1": {"beta": -0.1},
    "beta: expected a finite number; got nan": {"beta": float("nan")},
    r"epsilon: expected a number in \[0, 1\]; got 1.5": {"epsilon": 1.5},
    r"top_entropy_quantile: .* in \[0, 1\]": {"top_entropy_quantile": 1.2},
    "delta: expected a number > 1; got 0.9": {"delta": 0.9},
    "max_completion_length: .* int; got 0": {"loss_type": "dr_grpo", "max_completion_length": 0},
    # What the loss type has no use for.
    "delta=1.4 has no effect with loss_type='cispo': remove it": {**CISPO, "delta": 1.4},
    "importance_sampling_level='sequence' has no effect with loss_type='gmpo'": {
        "loss_type": "gmpo", "importance_sampling_level": "sequence",
    },
    "aggregation='dapo' has no effect with": {"loss_type": "grpo", "aggregation": "dapo"},
    "sapo_temperature_pos=2.0 has no effect with": {"sapo_temperature_pos": 2.0},
    "is_clip_max=2.0 and is_clip_min=None have no effect with": {"is_clip_max": 2.0},
    "entropy_threshold=1.0 has no effect with top_entropy_quantile": {"entropy_threshold": 1.0},
    "max_completion_length=64 has no effect": {"loss_type": "grpo", "max_completion_length": 64},
    # What does not go together.
    "loss_type='cispo' needs epsilon_high": {"loss_type": "cispo"},
    "dual_clip=3.0 does not work with delta=2.0": {"delta": 2.0, "dual_clip": 3.0},
    "is_correction='sequence_mask' does not work with loss_type='vespo'": {
        "loss_type": "vespo", "is_correction": "sequence_mask",
    },
    "is_correction='sequence_mask' .*: pass 'none', 'token_truncate'": {
        "loss_type": Vespo(), "is_correction": "sequence_mask",
    },
    "is_gate: expected one of ratio, binary_kl, tv; got 'kl'": {"is_gate": "kl"},
    "is_gate='tv' does not work with": {"is_correction": "token_truncate", "is_gate": "tv"},
    "is_clip_min=0.1 does not work with": {**MASK, "is_gate": "tv", "is_clip_min": 0.1},
    "is_correction='token_mask' needs a bound": {**MASK, "is_clip_max": None},
    "is_clip_min: expected less than is_clip_max = 3.0; got 4.0": {**MASK, "is_clip_min": 4.0},
    "max_completion_length: expected .* the 'dr_grpo'": {**CISPO, "aggregation": "dr_grpo"},
    # Losses that are given as such.
    "temperature_neg: expected a number > 0": {"loss_type": Sapo(temperature_neg=0.0)},
    r"epsilon=0.3 has no effect with loss_type=Clip\(.* on the instance": {
        "loss_type": Clip(), "epsilon": 0.3,
    },
    "loss_type.aggregation: expected one of grpo, .*": {"loss_type": own(aggregation="mean")},
}  # fmt: skip
WRONG_TYPES = {
    "use_bias_correction_kl: expected a bool; got 1": {"use_bias_correction_kl": 1},
    "entropy_threshold: expected a number; got str '1'": {
        "entropy_threshold": "1", "top_entropy_quantile": 0.5,
    },
    "entropy_coef: expected a number; got bool True": {"entropy_coef": True},
    "flag: expected a bool; got 1": {"loss_type": Checked(flag=1)},
    r"loss_type: expected an instance, Sapo\(\); got the class": {"loss_type": Sapo},
    "loss_type.token_local: expected a bool; got 'yes'": {"loss_type": own(token_local="yes")},
}  # fmt: skip


@pytest.mark.parametrize("message", [*WRONG_VALUES, *WRONG_TYPES])
def test_refuses(message):
    error, options = (
        (ValueError, WRONG_VALUES) if message in WRONG_VALUES else (TypeError, WRONG_TYPES)
    )
    with pytest.raises(error, match=f"^{message}"):
        GRPOLossConfig(**options[message])


@pytest.mark.parametrize(
    ("name", "hint"),
    (
        ("clip_eps", "'clip_eps': set epsilon"),
        ("kl_coef", "'kl_coef': set beta"),
        ("epsilon_low", "'epsilon_low': set epsilon"),
        ("num_iterations", "'num_iterations': in a TrainingConfig set epochs_per_rollout; .*"),
        ("temperature", r"'temperature': pass LMHead\(weight, temperature=...\) as .*"),
        ("gamma", "'gamma': there is no value function: .*"),
        ("entropy_coeff", "'entropy_coeff': set entropy_coef"),
        ("kl_clmp", r"'kl_clmp': did you mean kl_clamp or dual_clip\?"),
        ("verbosity", "'verbosity'"),
    ),
)
def test_an_unknown_option_is_answered(name, hint):
    """Names it here, if it is there; the signature stays."""
    for make in (GRPOLossConfig, partial(replace, GRPOLossConfig())):
        with pytest.raises(TypeError, match=rf"unexpected keyword argument {hint}$"):
            make(**{name: 1})
    assert [*inspect.signature(GRPOLossConfig).parameters] == [
        x.name for x in fields(GRPOLossConfig)
    ]


def test_names_are_aliases():
    sequence = {"importance_sampling_level": "sequence"}
    for options, loss in (
        ({}, Clip()),
        ({"loss_type": "grpo", "epsilon": 0.1}, Clip(aggregation="grpo", epsilon=0.1)),
        ({"loss_type": "dapo", **sequence}, Clip(ratio_level="sequence")),
        ({"loss_type": "gspo"}, Clip(aggregation="grpo", ratio_level="sequence")),
        ({"loss_type": "gspo_token", **sequence},
         Clip(aggregation="grpo", ratio_level="sequence", token_gradient=True)),
        ({"loss_type": "cispo", "epsilon_high": 5.0}, Cispo(epsilon_high=5.0)),
        ({"loss_type": "sapo", "sapo_temperature_neg": 1.2}, Sapo(temperature_neg=1.2)),
        ({"loss_type": "vespo", "vespo_k_pos": 1.0}, Vespo(k_pos=1.0)),
    ):  # fmt: skip
        named, given = GRPOLossConfig(**options), GRPOLossConfig(loss_type=loss)
        assert named.loss == loss and given.loss is loss
        for name in ("effective_aggregation", "one_pass", "needs_sequences"):
            assert getattr(given, name) == getattr(named, name), (name, loss)
    assert GRPOLossConfig(loss_type=Clip(), aggregation="grpo").effective_aggregation == "grpo"


def test_defaults_of_the_classes_are_those_of_the_config():
    flat = {field.name: field.default for field in fields(GRPOLossConfig)}
    for loss_type in LOSS_TYPES:
        for name, field in flat_fields(loss_type).items():
            assert field.default == flat[name], (loss_type, name)


def test_the_loss_goes_with_the_config():
    """Into copies and other processes, and out of comparisons."""
    cfg = config(loss_type="cispo")
    assert cfg.loss is cfg.loss
    assert cfg == GRPOLossConfig(loss_type="cispo", epsilon_high=1.1) and hash(cfg)
    assert replace(cfg, epsilon_high=3.0).loss == Cispo(epsilon_high=3.0)
    assert pickle.loads(pickle.dumps(cfg)).loss == cfg.loss
    assert "loss" not in {field.name for field in fields(cfg)}


@pytest.mark.parametrize(
    ("options", "one_pass"),
    (
        ({"dual_clip": 3.0, "beta": 0.1, "kl_estimator": "k1+", "entropy_coef": 0.1}, True),
        ({"is_correction": "sequence_mask"}, True),
        ({"importance_sampling_level": "sequence"}, False),
        ({"off_policy_threshold": 0.5}, False),
        ({"top_entropy_quantile": 0.2}, False),
        ({"top_entropy_quantile": 0.2, "entropy_threshold": 1.0}, True),
        ({"top_entropy_quantile": 0.2, "entropy_threshold": 1.0, "entropy_coef": 0.1}, False),
        ({"loss_type": own()}, False),
        ({"loss_type": own(token_local=True)}, True),
        ({"loss_type": own(token_local=True), "off_policy_threshold": 0.5}, False),
    ),
)
def test_one_pass(options, one_pass):
    """Answers of combinations; `test_objective.py` asks autograd about the loss types."""
    cfg = GRPOLossConfig(**options)
    assert cfg.one_pass is one_pass
    assert (cfg.why_two_passes() is None) is one_pass


def test_a_callable_says_what_it_is():
    nothing = GRPOLossConfig(loss_type=own())
    assert not nothing.gradient_needs_advantage and not nothing.entropy_has_gradient
    everything = own(gradient_needs_advantage=True, entropy_gradient=True)
    cfg = GRPOLossConfig(loss_type=everything)
    assert cfg.gradient_needs_advantage and cfg.entropy_has_gradient
    assert not replace(cfg, beta=0.1).gradient_needs_advantage
