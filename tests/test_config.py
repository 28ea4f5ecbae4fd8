"""The options `GRPOLossConfig` refuses, and its answers about passes and sequences."""

import dataclasses

import pytest

from grpo_kernels import GRPOLossConfig


@pytest.mark.parametrize(
    ("options", "error", "message"),
    (
        ({"loss_type": "ppo"}, ValueError, "loss_type: expected one of grpo, bnpo, .*got 'ppo'"),
        ({"loss_type": 3}, ValueError, "loss_type: expected one of .*or a callable; got 3"),
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
        ({"loss_type": "cispo"}, ValueError, "epsilon_high: expected a number, as loss_type='cisp"),
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
        ({"temperature": 0.0}, ValueError, "temperature: expected a number > 0; got 0.0"),
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
        pytest.param({"loss_type": lambda tokens: tokens.logps}, False, id="own"),
    ),
    ids=str,
)
def test_one_pass(options, one_pass):
    cfg = GRPOLossConfig(**options)
    assert cfg.one_pass is one_pass
    assert (cfg.two_pass_reason() is None) is one_pass


def test_passes_depend_on_the_arguments_in_two_cases():
    correction = GRPOLossConfig(is_correction="sequence_mask")
    assert "old_logps" in correction.two_pass_reason(has_old_logps=False)
    quantile = GRPOLossConfig(top_entropy_quantile=0.2)
    assert quantile.two_pass_reason(has_entropy_threshold=True) is None
    bonus = dataclasses.replace(quantile, entropy_coef=0.1)
    assert "entropy bonus" in bonus.two_pass_reason(has_entropy_threshold=True)
