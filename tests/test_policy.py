"""The policy: shared prompts, log-probs, and where its completions end."""

import random
from types import SimpleNamespace

import peft
import pytest
import torch
from transformers import AutoModelForCausalLM, OpenAIGPTConfig

from grpo_kernels import GRPOLossConfig
from grpo_kernels.training.run.metrics import Clock
from grpo_kernels.training.sampling.rollout import (
    GenerateRollout,
    SamplingParams,
    cut_completion,
    end_tokens,
)
from grpo_kernels.training.step.policy import Batch, Cached, Policy
from tests.helpers.tiny_models import FAMILIES, make_model, make_tokenizer
from tests.helpers.trainer_runs import assert_same_grads

pytestmark = pytest.mark.usefixtures("real_memory")
PROMPTS, GREEDY = [[7, 8, 9], [5, 6, 7, 8, 9, 10]], SamplingParams(6, temperature=0.0)


def random_batch(V=257, lengths=(5, 2, 6, 1, 4, 6), prompts=((7, 8, 9), (5,) * 6), seed=0):
    draw = random.Random(seed)
    completions = [[draw.randrange(1, V) for _ in range(n)] for n in lengths]
    return Batch.from_rows(prompts, [i % 2 for i in range(len(lengths))], completions, 0)


@pytest.mark.parametrize("lengths", ((5, 2, 6, 1, 4, 6), (1,) * 6), ids=("several", "one_token"))
@pytest.mark.parametrize("family", FAMILIES)
def test_shared_prompts_change_nothing(family, lengths):
    """Loss, log-probs and every gradient, for models that share and for those that fall back."""
    model = make_model(family).train()
    advantages = torch.randn(6, generator=torch.Generator().manual_seed(1))
    shared, apart = Policy(model), Policy(model, share_prompts=False)
    assert (shared.why_not_shared is None) == FAMILIES[family].shares, shared.why_not_shared
    assert shared.why_not_shared is None or "Sliding" in shared.why_not_shared
    outs, grads, batch, clock = [], [], random_batch(lengths=lengths), Clock(torch.device("cpu"))
    for policy in (shared, apart):
        policy.zero_grad()
        seconds = [clock.head_seconds]
        outs.append(policy("loss", batch, advantages, GRPOLossConfig(), clock=clock))
        seconds.append(clock.head_seconds)
        outs[-1].loss.backward()
        assert seconds[0] < seconds[1] < clock.head_seconds  # both directions count
        grads.append({n: p.grad.clone() for n, p in policy.named_parameters()})
    torch.testing.assert_close(outs[0].loss, outs[1].loss, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(outs[0].logps, outs[1].logps, rtol=1e-4, atol=1e-5)
    assert_same_grads(*grads, 1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_log_probs_are_the_models_own(family):
    """The shift, the padding, the positions and the head, against logits of each row alone."""
    model = make_model(family).eval()
    batch = random_batch()
    logps, entropy = Policy(model, temperature=0.8)("logps", batch, entropy=True)
    for i, length in enumerate(batch.mask.sum(1).tolist()):
        prompt = batch.prompts[batch.prompt_of[i]][batch.prompt_mask[batch.prompt_of[i]] == 1]
        ids = torch.cat([prompt, batch.completions[i, :length]])[None]
        with torch.no_grad():
            log_p = (model(ids).logits[0, len(prompt) - 1 : -1].float() / 0.8).log_softmax(-1)
        expected = log_p.gather(-1, batch.completions[i, :length, None]).squeeze(-1)
        torch.testing.assert_close(logps[i, :length], expected, rtol=1e-4, atol=2e-5)
        expected = -(log_p.exp() * log_p).sum(-1)
        torch.testing.assert_close(entropy[i, :length], expected, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_generation_goes_on_from_a_shared_prompt(family):
    model, tokenizer = make_model(family), make_tokenizer()
    shared = GenerateRollout(Policy(model), tokenizer)
    together = shared(PROMPTS, 3, GREEDY)
    apart = GenerateRollout(Policy(model, share_prompts=False), tokenizer)
    assert together == apart(PROMPTS, 3, GREEDY) and len(together) == 6
    assert together[0] == together[1] == together[2] != together[3]
    alone = [shared([prompt], 1, GREEDY)[0] for prompt in PROMPTS]
    assert alone == [together[0], together[3]]


def test_a_shared_prompt_overrules_what_a_config_says_of_caches():
    model, tokenizer = make_model("llama"), make_tokenizer()
    expected = GenerateRollout(Policy(model), tokenizer)(PROMPTS, 2, GREEDY)
    for name in (None, "dynamic", "static", "offloaded", "quantized"):
        for use_cache in (False, True):
            model.config.use_cache = model.generation_config.use_cache = use_cache
            model.generation_config.cache_implementation = name
            policy = Policy(model)
            assert policy.shares_prompts
            assert GenerateRollout(policy, tokenizer)(PROMPTS, 2, GREEDY) == expected
            assert model.generation_config.cache_implementation == name


def ignoring(model):
    """The model with a cache by another name, from which its forward does not go on."""
    forward = model.model.forward

    def other(memory=None, **kwargs):
        out = dict(forward(**kwargs))
        items = {"memory": Cached.from_output(out).keys_and_values}.items
        return SimpleNamespace(items=items, last_hidden_state=out["last_hidden_state"])

    model.model.forward = other
    return model


def test_a_model_that_leaves_a_cache_as_it_is_is_refused():
    """Model whose forward takes any keyword and no longer names the cache."""
    policy = Policy(ignoring(make_model("llama")))
    message = "share_prompts: LlamaModel did not continue from memory, .* 6 tokens instead of 11"
    with pytest.raises(RuntimeError, match=message):
        policy("logps", random_batch())
    model = make_model("llama")
    policy, generate, forward = Policy(model), model.generate, model.model.forward
    model.generate = lambda past_key_values=None, cache=None, **kwargs: generate(**kwargs)
    with pytest.raises(
        RuntimeError, match=r"did not continue from (cache|past_key_values), .* instead of 6"
    ):
        GenerateRollout(policy, make_tokenizer())(PROMPTS, 2, GREEDY)
    model.model.forward = lambda use_cache, **kwargs: forward(use_cache=False, **kwargs)
    with pytest.raises(RuntimeError, match="LlamaModel no longer returns a key-value cache"):
        policy("logps", random_batch())


def test_a_model_without_a_key_value_cache_shares_no_prompts():
    config = OpenAIGPTConfig(vocab_size=257, n_embd=32, n_layer=2, n_head=2, n_positions=64)
    torch.manual_seed(0)
    policy = Policy(AutoModelForCausalLM.from_config(config))
    assert policy.why_not_shared == "OpenAIGPTLMHeadModel has no key-value cache"
    done = GenerateRollout(policy, make_tokenizer())([[7, 8]], 2, SamplingParams(3, 0.0))
    assert [len(c.token_ids) for c in done] == [3, 3]


def test_completions_end_at_the_tokenizers_end_and_at_the_models():
    model, tokenizer = make_model("gpt2"), make_tokenizer()
    model.generation_config.eos_token_id = None
    rollout = GenerateRollout(Policy(model), tokenizer)
    full = rollout(PROMPTS[:1], 2, GREEDY)[0].token_ids
    at = 2
    assert full[at] not in full[:at]
    tokenizer.eos_token = tokenizer.convert_ids_to_tokens(full[at])
    for of_model, own in ((None, []), (250, [250]), ([250, 251], [250, 251])):
        model.generation_config.eos_token_id = of_model
        assert end_tokens(model, tokenizer) == [*own, full[at]]
        for count in (1, 2):
            done = rollout(PROMPTS[:1], count, GREEDY)[0]
            assert (done.token_ids, done.ended) == (full[: at + 1], True)
    tokenizer.eos_token, model.generation_config.eos_token_id = "<eos>", full[at]
    assert rollout(PROMPTS[:1], 2, GREEDY)[0] == done


def test_an_end_token_comes_before_a_stop_string_behind_it():
    tokenizer = make_tokenizer()
    row = tokenizer("ab<eos>cd").input_ids
    done = cut_completion(row, [0], SamplingParams(8, stop=("cd",)), tokenizer)
    assert (len(done.token_ids), done.ended) == (3, True)


def scripted(model, tokenizer, *texts):
    """Has the model say these texts, one per row, as far as it is asked for tokens."""
    ids, calls = [tokenizer(text).input_ids for text in texts], []

    def say(module, inputs, logits):
        logits = torch.zeros_like(logits)
        for row, tokens in enumerate(ids):
            logits[row, -1, tokens[len(calls)]] = 1.0
        calls.append(1)
        return logits

    model.get_output_embeddings().register_forward_hook(say)
    return GenerateRollout(Policy(model.eval()), tokenizer)


@pytest.mark.parametrize(
    ("texts", "expected"),
    (
        (("\nabcde", "fghijk"), (("\nabcde", False), ("fghijk", False))),  # begins in the prompt
        (("\n\nbcde", "a\nbcde"), (("\n\n", True), ("a\nbcde", False))),
        (("abc\n\nd", ";bcdef"), (("abc\n\n", True), (";", True))),  # several strings
        (("ab;\n\nc", "a\n;\n\n"), (("ab;", True), ("a\n;", True))),  # the first of them
    ),
)
@pytest.mark.parametrize("share", (True, False))
def test_stop_strings_count_in_the_completion_alone(share, texts, expected):
    """Rows that are done are padded, here with `!`, until the others are."""
    tokenizer = make_tokenizer()
    tokenizer.pad_token = "!"
    rollout = scripted(make_model("llama"), tokenizer, *texts)
    rollout.policy.why_not_shared = None if share else "a test"
    sampling = SamplingParams(6, temperature=0.0, stop=("\n\n", ";"))
    done = rollout([tokenizer("Q: 1+1\n").input_ids], 2, sampling)
    assert tuple((tokenizer.decode(x.token_ids), x.ended) for x in done) == expected


def test_padding_is_not_sampled_whatever_a_text_shows(monkeypatch):
    """Some tokenizers strip the space that a text begins with, and so a part of a stop string."""
    tokenizer = make_tokenizer()
    tokenizer.pad_token, decode = "!", tokenizer.decode
    monkeypatch.setattr(tokenizer, "decode", lambda *a, **k: decode(*a, **k).lstrip())
    rollout = scripted(make_model("llama"), tokenizer, " end..", "abcdef")
    done = rollout([tokenizer("Q:").input_ids], 2, SamplingParams(6, 0.0, stop=(" end",)))
    assert [(decode(x.token_ids), x.ended) for x in done] == [(" end", True), ("abcdef", False)]


@pytest.mark.parametrize("adapters", (False, True))
def test_what_a_model_brings_for_generate_is_left_out(adapters):
    """Penalties and cutoffs of its own would make the samples another policy's."""
    model = make_model("llama")
    if adapters:
        model = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"]))
    rollout = GenerateRollout(Policy(model), make_tokenizer())
    expected = rollout(PROMPTS[:1], 2, GREEDY)
    own = {
        "no_repeat_ngram_size": 1, "suppress_tokens": expected[0].token_ids[:1], "num_beams": 2,
        "repetition_penalty": 5.0, "min_new_tokens": 6,
    }  # fmt: skip
    model.generation_config.update(**own)
    assert rollout(PROMPTS[:1], 2, GREEDY) == expected
    assert model.generation_config.num_beams == 2  # and is there again
