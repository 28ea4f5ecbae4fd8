"""The options `GRPOLossConfig` refuses, and its answers about passes and sequences."""

import pickle
from dataclasses import dataclass, fields, replace

import pytest

from grpo_kernels import GRPOLossConfig
from grpo_kernels.losses import LOSS_TYPES, Cispo, Clip, Loss, Sapo, Vespo, flat_fields
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


@pytest.mark.parametrize(
    ("options", "error", "message"),
    (
        ({"loss_type": "ppo"}, ValueError, "loss_type: expected one of grpo, bnpo, .*got 'ppo'"),
        (
            {"loss_type": 3},
            ValueError,
            "loss_type: expected one of .*, a loss, or a callable; got 3",
        ),
        ({"is_correction": "token"}, ValueError, "is_correction: expected one of none, .*'token'"),
        ({"aggregation": "mean", "loss_type": "cispo"}, ValueError, "aggregation: expected one of"),
        ({"dual_clip": 1.0}, ValueError, "dual_clip: expected a number > 1; got 1.0"),
        ({"kl_clamp": 0.0}, ValueError, "kl_clamp: expected a number > 0; got 0.0"),
        ({"top_entropy_quantile": 1.2}, ValueError, r"top_entropy_quantile: .* in \[0, 1\]"),
        (
            {"use_bias_correction_kl": 1},
            TypeError,
            "use_bias_correction_kl: expected a bool; got 1",
        ),
        ({"off_policy_threshold": -0.1}, ValueError, "off_policy_threshold: .* >= 0; got -0.1"),
        ({"vespo_k_pos": 0.0, "loss_type": "vespo"}, ValueError, "vespo_k_pos: .* > 0; got 0.0"),
        # What the loss type has no use for.
        (
            {"loss_type": "cispo", "epsilon_high": 5.0, "delta": 1.4},
            ValueError,
            "delta: expected None, as loss_type='cispo' has no use for it; got 1.4",
        ),
        (
            {"loss_type": "cispo", "epsilon_high": 5.0, "epsilon": 0.3},
            ValueError,
            "epsilon: expected 0.2, as loss_type='cispo' has no use for it; got 0.3",
        ),
        (
            {"loss_type": "sapo", "importance_sampling_level": "sequence"},
            ValueError,
            "importance_sampling_level: expected 'token', as loss_type='sapo' has no use for it",
        ),
        (
            {"loss_type": "vespo", "importance_sampling_level": "sequence"},
            ValueError,
            "importance_sampling_level: expected 'token', as loss_type='vespo'",
        ),
        (
            {"loss_type": "gmpo", "importance_sampling_level": "sequence"},
            ValueError,
            "importance_sampling_level: expected 'token', as loss_type='gmpo'",
        ),
        (
            {"loss_type": "reinforce", "epsilon": 0.1},
            ValueError,
            "epsilon: expected 0.2, as loss_type='reinforce' has no use for it; got 0.1",
        ),
        (
            {"loss_type": "grpo", "aggregation": "dapo"},
            ValueError,
            "aggregation: expected None, as loss_type='grpo' has no use for it; got 'dapo'",
        ),
        ({"sapo_temperature_pos": 2.0}, ValueError, "sapo_temperature_pos: expected 1.0, as"),
        ({"is_clip_max": 2.0}, ValueError, "is_clip_max, is_clip_min: expected 3.0 and None"),
        # What does not go together.
        ({"loss_type": "cispo"}, ValueError, "epsilon_high: expected a number, as cispo bounds"),
        ({"delta": 2.0, "dual_clip": 3.0}, ValueError, "dual_clip: expected None when delta is"),
        (
            {"loss_type": "vespo", "is_correction": "sequence_mask"},
            ValueError,
            "is_correction: expected 'none', 'token_truncate' or 'token_mask'.*'sequence_mask'",
        ),
        (
            {"is_correction": "token_mask", "is_clip_max": None},
            ValueError,
            "is_clip_max: expected a bound, as is_correction='token_mask' needs one",
        ),
        (
            {"is_correction": "token_mask", "is_clip_min": 4.0},
            ValueError,
            "is_clip_min: expected less than is_clip_max = 3.0; got 4.0",
        ),
        (
            {"loss_type": "cispo", "epsilon_high": 5.0, "aggregation": "dr_grpo"},
            ValueError,
            "max_completion_length: expected a positive int, as the 'dr_grpo' aggregation",
        ),
        ({"kl_estimator": "k9"}, ValueError, "kl_estimator: expected one of k1, .*got 'k9'"),
        (
            {"importance_sampling_level": "word"},
            ValueError,
            "importance_sampling_level: expected one of token, sequence; got 'word'",
        ),
        ({"beta": -0.1}, ValueError, r"beta: expected a number >= 0; got -0.1"),
        ({"epsilon": 1.5}, ValueError, r"epsilon: expected a number in \[0, 1\]; got 1.5"),
        ({"epsilon_high": -1.0}, ValueError, "epsilon_high: expected a number >= 0; got -1.0"),
        ({"delta": 0.9}, ValueError, "delta: expected a number > 1; got 0.9"),
        (
            {"entropy_threshold": 1.0},
            ValueError,
            "entropy_threshold: expected None, as top_entropy_quantile = 1.0 trains every token",
        ),
        (
            {"entropy_threshold": "1", "top_entropy_quantile": 0.5},
            TypeError,
            "entropy_threshold: expected a number; got str '1'",
        ),
        ({"beta": float("nan")}, ValueError, "beta: expected a finite number; got nan"),
        ({"beta": "0.1"}, TypeError, "beta: expected a number; got str '0.1'"),
        ({"epsilon": None}, TypeError, "epsilon: expected a number; got NoneType None"),
        ({"entropy_coef": True}, TypeError, "entropy_coef: expected a number; got bool True"),
        (
            {"loss_type": "dr_grpo"},
            ValueError,
            "max_completion_length: expected a positive int, .*'dr_grpo'.*got None",
        ),
        (
            {"loss_type": "grpo", "max_completion_length": 64},
            ValueError,
            "max_completion_length: expected None, .*got 64 with loss_type='grpo'",
        ),
        (
            {"loss_type": "dr_grpo", "max_completion_length": 0},
            ValueError,
            "max_completion_length: expected a positive int; got 0",
        ),
    ),
    ids=str,
)
def test_config_refuses(options, error, message):
    with pytest.raises(error, match=message):
        GRPOLossConfig(**options)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    (
        (
            {"loss_type": Sapo(temperature_neg=0.0)},
            ValueError,
            "temperature_neg: expected a number > 0; got 0.0",
        ),
        (
            {"loss_type": Clip(ratio_level="word")},
            ValueError,
            "ratio_level: expected one of token, sequence; got 'word'",
        ),
        ({"loss_type": Checked(flag=1)}, TypeError, "flag: expected a bool; got 1"),
        (
            {"loss_type": Sapo},
            TypeError,
            r"loss_type: expected an instance, Sapo\(\); got the class",
        ),
        (
            {"loss_type": Clip(), "epsilon": 0.3},
            ValueError,
            r"epsilon: expected 0.2, as loss_type=Clip\(.*\) has options of its own; got 0.3",
        ),
        (
            {"loss_type": own(), "delta": 1.3},
            ValueError,
            "delta: expected None, as loss_type=.* has no use for it; got 1.3",
        ),
        (
            {"loss_type": Vespo(), "is_correction": "sequence_mask"},
            ValueError,
            "is_correction: expected 'none', 'token_truncate' or 'token_mask'",
        ),
        (
            {"loss_type": own(token_local="yes")},
            TypeError,
            "loss_type.token_local: expected a bool; got 'yes'",
        ),
        (
            {"loss_type": own(aggregation="mean")},
            ValueError,
            "loss_type.aggregation: expected one of grpo, .*; got 'mean'",
        ),
    ),
    ids=(
        "number",
        "choice",
        "flag",
        "class",
        "flat",
        "callable",
        "sampler",
        "claim",
        "aggregation",
    ),
)
def test_refuses_losses(options, error, message):
    with pytest.raises(error, match=message):
        GRPOLossConfig(**options)


@pytest.mark.parametrize(
    ("make", "message"),
    (
        (lambda: Cispo(), "epsilon_high: expected a number, as cispo bounds the ratio"),
        (lambda: Clip(delta=2.0, dual_clip=3.0), "dual_clip: expected None when delta is set"),
    ),
    ids=("cispo", "clip"),
)
def test_losses_refuse(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_names_are_aliases():
    for options, loss in (
        ({}, Clip()),
        ({"loss_type": "grpo", "epsilon": 0.1}, Clip(aggregation="grpo", epsilon=0.1)),
        (
            {"loss_type": "dapo", "importance_sampling_level": "sequence"},
            Clip(ratio_level="sequence"),
        ),
        ({"loss_type": "gspo"}, Clip(aggregation="grpo", ratio_level="sequence")),
        (
            {"loss_type": "gspo_token", "importance_sampling_level": "sequence"},
            Clip(aggregation="grpo", ratio_level="sequence", token_gradient=True),
        ),
        ({"loss_type": "cispo", "epsilon_high": 5.0}, Cispo(epsilon_high=5.0)),
        ({"loss_type": "sapo", "sapo_temperature_neg": 1.2}, Sapo(temperature_neg=1.2)),
        ({"loss_type": "vespo", "vespo_k_pos": 1.0}, Vespo(k_pos=1.0)),
    ):
        named = GRPOLossConfig(**options)
        assert named.loss == loss
        given = GRPOLossConfig(loss_type=loss)
        assert given.loss is loss
        assert given.effective_aggregation == named.effective_aggregation
        assert given.one_pass == named.one_pass
        assert given.needs_sequences == named.needs_sequences
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


def test_config_is_frozen():
    with pytest.raises(AttributeError):
        GRPOLossConfig().beta = 1.0


@pytest.mark.parametrize(
    ("options", "one_pass"),
    (
        ({}, True),
        ({"dual_clip": 3.0, "beta": 0.1, "kl_estimator": "k1+", "entropy_coef": 0.1}, True),
        ({"loss_type": "cispo", "epsilon_high": 5.0}, True),
        ({"loss_type": "sapo"}, True),
        ({"loss_type": "reinforce", "aggregation": "grpo"}, True),
        ({"loss_type": "dppo_tv"}, True),
        ({"loss_type": "luspo"}, True),
        ({"is_correction": "token_truncate"}, True),
        ({"is_correction": "sequence_mask"}, True),
        ({"loss_type": "gspo"}, False),
        ({"loss_type": "gspo_token"}, False),
        ({"loss_type": "gmpo"}, False),
        ({"loss_type": "vespo"}, False),
        ({"importance_sampling_level": "sequence"}, False),
        ({"off_policy_threshold": 0.5}, False),
        ({"top_entropy_quantile": 0.2}, False),
        ({"top_entropy_quantile": 0.2, "entropy_threshold": 1.0}, True),
        ({"top_entropy_quantile": 0.2, "entropy_threshold": 1.0, "entropy_coef": 0.1}, False),
        pytest.param({"loss_type": own()}, False, id="own"),
        pytest.param({"loss_type": own(token_local=True)}, True, id="own_token_local"),
        pytest.param(
            {"loss_type": own(token_local=True), "off_policy_threshold": 0.5}, False,
            id="own_off_policy",
        ),
    ),
    ids=str,
)  # fmt: skip
def test_one_pass(options, one_pass):
    cfg = GRPOLossConfig(**options)
    assert cfg.one_pass is one_pass
    assert (cfg.why_two_passes() is None) is one_pass


def test_reasons():
    correction = GRPOLossConfig(is_correction="sequence_mask")
    assert "old_logps" in correction.why_two_passes(has_old_logps=False)
    bonus = config(top_entropy_quantile=0.2, entropy_threshold=1.0, entropy_coef=0.1)
    assert "entropy bonus" in bonus.why_two_passes()
    assert "Vespo weighs a token" in config(loss_type="vespo").why_two_passes()
    assert "ratio" in config(loss_type="gspo").why_two_passes()
    assert "token_local" in GRPOLossConfig(loss_type=own()).why_two_passes()


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_what_needs_an_advantage(loss_type):
    """A KL or a bonus is a gradient of its own; `test_objective.py` asks autograd."""
    assert config(loss_type=loss_type).gradient_needs_advantage
    assert not config(loss_type=loss_type, beta=0.1).gradient_needs_advantage
    bonus = config(loss_type=loss_type, entropy_coef=0.1)
    assert not bonus.gradient_needs_advantage and bonus.entropy_has_gradient
    assert not config(loss_type=loss_type).entropy_has_gradient


def test_a_callable_says_what_it_is():
    nothing = GRPOLossConfig(loss_type=own())
    assert not nothing.gradient_needs_advantage and not nothing.entropy_has_gradient
    everything = own(gradient_needs_advantage=True, entropy_gradient=True)
    cfg = GRPOLossConfig(loss_type=everything)
    assert cfg.gradient_needs_advantage and cfg.entropy_has_gradient
    assert not replace(cfg, beta=0.1).gradient_needs_advantage
