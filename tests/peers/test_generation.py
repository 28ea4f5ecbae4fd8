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
)

from grpo_kernels.integrations.generation import StopStrings, SupportRecorder
from tests.helpers.tiny_models import make_model, make_tokenizer

pytestmark = pytest.mark.usefixtures("real_memory")
STEPS = 6
# id: (options, generate's warpers in their order)
CASES = {
    "top_k": ({"top_k": 5}, [TopKLogitsWarper(5)]),
    "min_p": ({"min_p": 0.4}, [MinPLogitsWarper(0.4)]),
    "cold": (
        {"temperature": 0.4, "top_p": 0.9},
        [TemperatureLogitsWarper(0.4), TopPLogitsWarper(0.9)],
    ),
    "all": (
        {"temperature": 0.3, "top_k": 40, "top_p": 0.8, "min_p": 0.1},
        [TemperatureLogitsWarper(0.3), TopKLogitsWarper(40), TopPLogitsWarper(0.8),
         MinPLogitsWarper(0.1)],
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
    plain = {"top_k": 0, "top_p": 1.0, "temperature": 1.0} | options
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
    assert len(sizes) > 1 or case == "top_k"


@pytest.mark.parametrize("kinds", ((np.float32, np.int64), (np.array, np.array)), ids=str)
def test_numbers_of_numpy(kinds):
    (real, whole), options = kinds, {"temperature": 0.5, "top_p": 0.75, "min_p": 0.125}
    recorders = [
        SupportRecorder(**options, top_k=9),
        SupportRecorder(**{name: real(x) for name, x in options.items()}, top_k=whole(9)),
    ]
    expected, actual = (
        [recorded_sample(flat_model(), x), *x.supports([STEPS] * 3)] for x in recorders
    )
    for one, other in zip(expected, actual, strict=True):
        assert all(map(torch.equal, one, other))


def test_generate_truncates_no_further():
    """Whatever the model's own defaults are."""
    model = flat_model()
    model.generation_config.update(top_k=2, top_p=0.1, min_p=0.9, temperature=0.1, do_sample=False)
    recorder = SupportRecorder(top_k=30)
    ids = recorded_sample(model, recorder)
    model.generation_config.update(top_k=30, top_p=1.0, min_p=None, temperature=1.0, do_sample=True)
    assert torch.equal(ids, sample(model))


def test_words_that_another_processor_forbids():
    recorder = SupportRecorder(top_k=5)
    model = flat_model()
    with torch.no_grad():
        best = int(model(PROMPTS).logits[0, -1].argmax())
    recorded_sample(model, recorder, suppress_tokens=[best])
    token_ids, offsets = recorder.supports([1, 0, 0])[0]
    assert offsets.tolist() == [0, 5] and best not in token_ids


def test_what_is_refused():
    """A second call of generate, and lengths that were not recorded."""
    recorder, model = SupportRecorder(top_k=5), flat_model()
    recorded_sample(model, recorder)
    for lengths in ([1, 1], [1, 1, STEPS + 1]):
        with pytest.raises(ValueError, match="lengths: expected 3 numbers up to 6"):
            recorder.supports(lengths)
    with pytest.raises(ValueError, match=r"input_ids: expected shape \[3, 9\], one token more"):
        recorded_sample(model, recorder)


def test_nothing_recorded():
    token_ids, offsets = SupportRecorder(top_k=5).supports([0])[0]
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
