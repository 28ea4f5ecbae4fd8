"""The losses that `GRPOLossConfig` names, and its answers about passes and sequences."""

import pickle
from dataclasses import fields, replace

import pytest

from grpo_kernels import GRPOLossConfig
from grpo_kernels.loss.losses import LOSS_TYPES, Cispo, Clip, Sapo, flat_fields
from tests.helpers.batches import config
from tests.refusals.core import own


def test_names_are_aliases():
    for options, loss in (
        ({"loss_type": "grpo", "epsilon": 0.1}, Clip(aggregation="grpo", epsilon=0.1)),
        ({"loss_type": "gspo_token", "importance_sampling_level": "sequence"},
         Clip(aggregation="grpo", ratio_level="sequence", token_gradient=True)),
        ({"loss_type": "sapo", "sapo_temperature_neg": 1.2}, Sapo(temperature_neg=1.2)),
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
        ({"is_correction": "sequence_mask"}, True),
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
