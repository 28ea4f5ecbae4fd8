"""Score centering in the trainer: the loss with the sampler's likeliest ids, and who has them."""

import math
import random
from dataclasses import replace

import pytest
import torch

from grpo_kernels import GRPOLossConfig, score_centering
from grpo_kernels.training.centering import WEIGHTS
from grpo_kernels.training.policy import Policy
from grpo_kernels.training.rollout import RolloutError
from tests.helpers.tiny_models import make_model
from tests.helpers.trainer_runs import (
    FakeRollout,
    assert_same_grads,
    config_of,
    rows_of,
    trainer_of,
)
from tests.test_policy import random_batch

pytestmark = pytest.mark.usefixtures("real_memory", "curves")
K, ITEMS = 6, 31.0


class WithTop(FakeRollout):
    """Says that some ids were the likeliest, with less than all of the probability."""

    def __call__(self, prompts, count, sampling):
        draw = random.Random(7)
        done = super().__call__(prompts, count, sampling)
        if not sampling.top_logps:
            return done
        ids = [[draw.sample(range(33, 90), sampling.top_logps) for _ in x.token_ids] for x in done]
        q = math.log(0.9 / sampling.top_logps)
        return [
            replace(one, top=[dict.fromkeys(of_token, q) for of_token in some])
            for one, some in zip(done, ids, strict=True)
        ]


@pytest.mark.parametrize("correction", WEIGHTS)
def test_gradients_are_those_of_logits(correction):
    model, batch = make_model("llama").train(), random_batch()
    config = GRPOLossConfig(
        loss_type="reinforce", is_correction=correction,
        is_clip_max=3.0 if correction == "none" else 1.4,
        is_clip_min=0.7 if correction == "token_mask" else None,
    )  # fmt: skip
    g = torch.Generator().manual_seed(1)
    advantages = torch.randn(len(batch.completions), generator=g)
    ids = torch.cat([batch.prompts[batch.prompt_of], batch.completions], 1)[:, :-1]
    attention = torch.cat([batch.prompt_mask[batch.prompt_of], batch.attention], 1)[:, :-1]
    places = (attention.cumsum(1) - 1).clamp(min=0)
    logits = model(ids, attention_mask=attention, position_ids=places).logits
    log_p = logits[:, -batch.completions.shape[1] :].log_softmax(-1)
    log_q = (log_p.detach() + 0.5 * torch.randn(log_p.shape, generator=g)).log_softmax(-1)
    top_logps, top_ids = log_q.topk(K)
    sampled = log_q.gather(-1, batch.completions[..., None]).squeeze(-1)
    given = (advantages[:, None].expand_as(sampled), sampled, top_logps)
    logps = (log_p.gather(-1, x) for x in (batch.completions[..., None], top_ids))
    bounds = {"low": config.is_clip_min or 0.0, "high": 1.4}
    of_each = score_centering(
        next(logps).squeeze(-1), next(logps), *given, weight=WEIGHTS[correction], **bounds
    )
    expected_loss = (of_each * batch.mask).sum() / ITEMS
    expected_loss.backward()
    expected = {n: p.grad.clone() for n, p in model.named_parameters()}
    model.zero_grad()
    loss, metrics, found = Policy(model)(
        "loss", batch, advantages, config, top_ids=top_ids, top_logps=top_logps,
        sampling_logps=sampled, num_items=ITEMS,
    )  # fmt: skip
    loss.backward()
    torch.testing.assert_close(loss.detach(), expected_loss.detach(), rtol=1e-5, atol=1e-6)
    assert_same_grads({n: p.grad for n, p in model.named_parameters()}, expected, 1e-4)
    assert not found.requires_grad and all(x.isfinite() for x in metrics.values())


OPTIONS = {"loss_type": "reinforce", "score_centering": K}


def test_micro_batches_do_not_change_a_run(tiny_model, tmp_path):
    rows = []
    for size in (16, 4):
        config = config_of(tiny_model, tmp_path / str(size), micro_batch_size=size, **OPTIONS)
        rows.append(rows_of(trainer_of(config, rollout=lambda _: WithTop(logps=-2.0)).train()))
    for one, other in zip(*rows, strict=True):
        assert one["grad_norm"] > 0 and one["entropy"] > 0
        assert one["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-4)
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-4)


class FewTokens(WithTop):
    def __call__(self, *args):
        return [replace(x, top=x.top and x.top[:1]) for x in super().__call__(*args)]


class FewIds(WithTop):
    def __call__(self, *args):
        done = super().__call__(*args)
        return [replace(x, top=x.top and [{33: -1.0} for _ in x.top]) for x in done]


@pytest.mark.parametrize(
    ("rollout", "message"),
    (
        (FakeRollout, "score_centering: expected Completion.top"),
        (FewTokens, r"completions\[0\].top"),
        (FewIds, r"completions\[0\].top"),
    ),
)
def test_a_rollout_has_to_say_them(rollout, message, tiny_model, tmp_path):
    config = config_of(tiny_model, tmp_path, **OPTIONS)
    with pytest.raises(RolloutError, match=message):
        trainer_of(config, rollout=lambda _: rollout(logps=-2.0)).train()


@pytest.mark.parametrize(
    ("options", "name"),
    (({"loss_type": "dapo"}, "loss_type"), ({"beta": 0.1}, "beta"), ({"top_p": 0.9}, "top_p"),
     ({"score_centering": 21}, "score_centering"), ({"score_centering": -1}, "score_centering"),
     ({"rollout": "vllm", "vllm_mode": "server"}, "score_centering"),
     ({"is_correction": "sequence_mask"}, "is_correction")),
)  # fmt: skip
def test_what_does_not_go_with_it_is_named(options, name, tiny_model, tmp_path):
    with pytest.raises(ValueError, match=f"^{name}: expected .*; got "):
        config_of(tiny_model, tmp_path, **{**OPTIONS, **options})


def test_generate_is_refused_before_anything_is_sampled(tiny_model, tmp_path):
    with pytest.raises(ValueError, match=r"^score_centering: expected 0 with a rollout that"):
        trainer_of(config_of(tiny_model, tmp_path, **OPTIONS))
