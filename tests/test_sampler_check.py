"""Check whether a sampler rounds its logits as the policy does."""

from dataclasses import replace

import pytest
import torch

from grpo_kernels import check_sampler, linear_logprobs
from grpo_kernels.head.lm_head import LMHead
from grpo_kernels.training.sampling.rollout import GenerateRollout
from tests.helpers.batches import make_batch
from tests.helpers.tiny_models import make_tokenizer

HERE = "logits_dtype='model'"
THERE = "--hf-overrides"


@pytest.fixture(scope="module")
def scored():
    """Log-probs of a policy in bf16: from float32 logits, from rounded ones, of an eager head."""
    batch = make_batch(B=8, T=32).to("cpu", torch.bfloat16)
    hidden = torch.where(batch.mask[..., None], batch.hidden, 0.0)
    targets = batch.targets.clamp(min=0)
    fp32, model = (
        linear_logprobs(hidden, LMHead(batch.weight, logits_dtype=dtype), targets).logps
        for dtype in ("fp32", "model")
    )
    logits = torch.nn.functional.linear(hidden, batch.weight)
    log_p = logits.float().log_softmax(-1)
    eager = log_p.gather(-1, targets[..., None])[..., 0]
    return fp32, model, eager, batch.mask


def test_a_sampler_that_rounds(scored):
    fp32, model, eager, mask = scored
    check = check_sampler(eager, fp32, model, mask)
    assert check.closer == "model" and check.rms_model < 0.2 * check.rms_fp32
    assert check.outside_fp32 >= check.outside_model and check.tokens == int(mask.sum())
    assert HERE in check.advice and THERE in check.advice
    assert check.advice in str(check) and f"{check.rms_fp32:.2g} nats RMS" in str(check)
    # Masked tokens, and tokens that the sampler did not score, do not count.
    sampled, first = eager.clone(), torch.zeros_like(mask)
    sampled[0], first[:2] = torch.nan, True
    some = check_sampler(sampled, fp32, model, first)
    assert some == check_sampler(eager[1], fp32[1], model[1]) and some.tokens == fp32.shape[1]


def test_others(scored):
    """Samplers in float32, with a difference of another cause, and with none."""
    fp32, model, eager, mask = scored
    check = check_sampler(fp32 + 1e-5, fp32, model, mask)
    assert check.closer == "fp32" and "use logits_dtype='fp32'" in check.advice
    assert check.rms_fp32 == pytest.approx(1e-5, rel=0.05)
    noise = 0.5 * torch.randn(fp32.shape, generator=torch.Generator().manual_seed(0))
    check = check_sampler(eager + noise, fp32, model, mask)
    assert check.closer is None and "does not explain" in check.advice
    assert 0.5 < check.outside_fp32 < 1
    assert check_sampler(fp32, fp32, fp32).closer is None


class RoundingSampler(GenerateRollout):
    """Reports log-probs of a head that rounds its logits, or of one that does not."""

    def __call__(self, prompts, count, sampling):
        completions, model = super().__call__(prompts, count, sampling), self.policy.model
        head = LMHead(model.lm_head.weight, logits_dtype=self.logits_dtype)
        for i, completion in enumerate(completions):
            targets = torch.tensor(completion.token_ids)
            ids = torch.tensor([[*prompts[i // count], *completion.token_ids]])
            with torch.no_grad():
                hidden = model.base_model(ids).last_hidden_state[0, -len(targets) - 1 : -1]
            logps = linear_logprobs(hidden, head, targets).logps
            completions[i] = replace(completion, logps=logps.tolist())
        return completions


@pytest.mark.usefixtures("real_memory")
@pytest.mark.parametrize(("theirs", "advice"), (("model", "set is_correction to"), ("fp32", None)))
def test_the_trainer_warns_in_its_first_step(theirs, advice, make, capsys):
    sampler = type("Sampler", (RoundingSampler,), {"logits_dtype": theirs})
    make(dtype="bf16", rollout=lambda policy: sampler(policy, make_tokenizer())).train()
    printed = capsys.readouterr().out
    assert printed.count("sampler to policy over") == (advice is not None)
    assert advice is None or advice in printed
