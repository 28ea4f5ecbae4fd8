"""The recorder of kept words: the samples and the supports of transformers' own warpers."""

import numpy as np
import pytest
import torch

pytest.importorskip("transformers", reason="needs the extra 'test'")
from transformers import (
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    WatermarkingConfig,
)

from grpo_kernels.integrations.generation import StopStrings, SupportRecorder, refuse_processors
from tests.helpers.tiny_models import make_model, make_tokenizer

pytestmark = pytest.mark.usefixtures("real_memory")
STEPS = 6
# id: (options, generate's warpers in their order)
CASES = {
    "cold": (
        {"temperature": 0.4, "top_p": 0.9},
        [TemperatureLogitsWarper(0.4), TopPLogitsWarper(0.9)],
    ),
    "all": (
        {"temperature": 0.3, "top_k": 40, "top_p": 0.8, "min_p": 0.1},
        [TemperatureLogitsWarper(0.3), TopKLogitsWarper(40), TopPLogitsWarper(0.8),
         MinPLogitsWarper(0.1)],
    ),
    "numbers of NumPy": (
        {"temperature": np.array(0.5), "top_k": np.int64(9), "top_p": np.float32(0.75)},
        [TemperatureLogitsWarper(0.5), TopKLogitsWarper(9), TopPLogitsWarper(0.75)],
    ),
}  # fmt: skip
PROMPTS = torch.tensor([[3, 5, 7], [11, 13, 17], [19, 23, 29]])


def flat_model():
    model = make_model("qwen2").eval()
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(0.6)
    model.generation_config.eos_token_id = None
    return model


def sample(model, **options):
    torch.manual_seed(0)
    return model.generate(
        PROMPTS, max_new_tokens=STEPS, attention_mask=torch.ones_like(PROMPTS), **options
    )


def recorded_sample(model, recorder, **options):
    return sample(model, logits_processor=[recorder], **recorder.generate_options(), **options)


@pytest.mark.parametrize("case", CASES)
def test_what_generate_keeps(case):
    options, warpers = CASES[case]
    model = flat_model()
    plain = {name: getattr(x, "item", lambda x=x: x)() for name, x in options.items()}
    plain = {"top_k": 0, "top_p": 1.0, "temperature": 1.0} | plain
    expected = sample(model, do_sample=True, **plain)
    recorder = SupportRecorder(**options)
    ids = recorded_sample(model, recorder)
    assert torch.equal(ids, expected)

    with torch.no_grad():
        logits = model(ids).logits[:, 2:-1].float()
    lengths = [STEPS, 2, 4]
    sizes = set()
    for row, (token_ids, offsets) in enumerate(recorder.supports(lengths)):
        assert token_ids.dtype == torch.int32 and offsets.dtype == torch.int64
        assert len(offsets) == lengths[row] + 1 and offsets[-1] == len(token_ids)
        for i in range(lengths[row]):
            scores = logits[row, i][None]
            for warper in warpers:
                scores = warper(ids, scores)
            token_set = token_ids[offsets[i] : offsets[i + 1]]
            assert token_set.tolist() == (scores[0] > -torch.inf).nonzero()[:, 0].tolist()
            assert ids[row, 3 + i] in token_set
            sizes.add(len(token_set))
    assert max(sizes) < 257
    assert len(sizes) > 1


# Defaults of a model by which `generate` would sample from other scores.
OWN = {
    "sampling": {"top_k": 2, "top_p": 0.1, "min_p": 0.9, "temperature": 0.1, "do_sample": False},
    "top_h": {"top_h": 0.3},
    "typical_p": {"typical_p": 0.2},
    "epsilon_cutoff": {"epsilon_cutoff": 0.05},
    "eta_cutoff": {"eta_cutoff": 0.99},
    "repetition_penalty": {"repetition_penalty": 3.0},
    "guidance_scale": {"guidance_scale": 3.0},
    "sequence_bias": {"sequence_bias": [[[token], 9.0] for token in range(3, 9)]},
    "exponential_decay": {"exponential_decay_length_penalty": (0, 9.0), "eos_token_id": 1},
    # Words that another processor forbids would be possible again.
    "remove_invalid_values": {
        "remove_invalid_values": True, "bad_words_ids": [[token] for token in range(240)]
    },
    "watermarking_config": {"watermarking_config": WatermarkingConfig(bias=30.0)},
}  # fmt: skip


@pytest.mark.parametrize("own", OWN)
def test_generate_samples_from_what_is_recorded(own):
    """Whatever the model's own defaults are."""
    model, recorder = flat_model(), SupportRecorder(top_k=30)
    kept = {k: x for k, x in OWN[own].items() if k in ("eos_token_id", "bad_words_ids")}
    model.generation_config.update(top_k=30, do_sample=True, pad_token_id=0, **kept)
    expected = sample(model)
    model.generation_config.update(**OWN[own])
    assert own in ("remove_invalid_values", "sampling") or not torch.equal(sample(model), expected)
    ids = sample(model, logits_processor=[recorder], **recorder.generate_options(model))
    assert torch.equal(ids, expected)
    size = 257 - 240 if "bad_words_ids" in kept else 30
    assert all(len(ids) == size * 2 for ids, _ in recorder.supports([2, 2, 2]))


FORBIDDING = {
    "bad_words_ids": [[5], [6, 7]], "suppress_tokens": [5], "begin_suppress_tokens": [5],
    "no_repeat_ngram_size": 2, "encoder_no_repeat_ngram_size": 2, "min_length": 1,
    "min_new_tokens": 1, "forced_bos_token_id": 3, "forced_eos_token_id": 1,
    "prefix_allowed_tokens_fn": lambda row, ids: [3, 4], "renormalize_logits": True,
    "num_return_sequences": 2, "eos_token_id": 1,
}  # fmt: skip


def test_options_that_forbid_tokens_are_accepted():
    model = flat_model()
    options = {"do_sample": True, "temperature": 0.5, "top_k": 9, "top_p": 0.9, "min_p": 0.1}
    config = refuse_processors(model, "x", **options, **FORBIDDING)
    assert (config.top_k, config.min_p, config.suppress_tokens) == (9, 0.1, [5])


def test_words_that_another_processor_forbids():
    recorder = SupportRecorder(top_k=5)
    model = flat_model()
    with torch.no_grad():
        best = int(model(PROMPTS).logits[0, -1].argmax())
    recorded_sample(model, recorder, suppress_tokens=[best])
    token_ids, offsets = recorder.supports([1, 0, 0])[0]
    assert offsets.tolist() == [0, 5] and best not in token_ids
    token_ids, offsets = SupportRecorder(top_k=5).supports([0])[0]  # without a call
    assert token_ids.tolist() == [] and offsets.tolist() == [0]


def test_a_stop_string_may_end_inside_of_a_token():
    tokenizer = make_tokenizer()
    tokenizer.add_tokens(["b;c", "\n\n"])
    rows = [("a", "b;c", "d"), ("a", "b", ";"), ("\n\n", "a", "b;c"), ("a", "b", "c"),
            ("b;c", "b;c", "d")]  # fmt: skip
    prompt = [tokenizer(text).input_ids for text in ("x", "\n")]
    encode = {token: tokenizer(token).input_ids[0] for row in rows for token in row}
    ids = torch.tensor([[*prompt[0], *prompt[1], *map(encode.get, row)] for row in rows])
    stop = StopStrings(tokenizer, ["b;", "\n\n\n"], 2)
    assert stop.lengths() == []
    ended = [stop(ids[:, :length], None).tolist() for length in (3, 4, 5)]
    assert ended[0] == [False] * 4 + [True] and stop.lengths() == [2, 3, 3, 0, 1]
