"""`VLLMRollout` beside a small engine in vLLM's place; `tests/vllm` has the real one."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator

from grpo_kernels.integrations import vllm as extension
from grpo_kernels.training import load_model
from grpo_kernels.training.sampling.rollout import RolloutError, SamplingParams
from grpo_kernels.training.sampling.vllm_rollout import VLLMRollout
from tests.helpers.fake_vllm import install
from tests.helpers.trainer_runs import config_of
from tests.helpers.vllm_runs import vllm_model

pytestmark = pytest.mark.usefixtures("real_memory")
PROMPTS = ("12+34=", "7+5=", "90+1=")
SAMPLING = SamplingParams(8)
MASKED = SamplingParams(8, top_k=20, top_p=0.9, record_support=True)
MASKS = {"top_k": MASKED.top_k, "top_p": MASKED.top_p}


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory):
    return vllm_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def engine(monkeypatch):
    return install(monkeypatch)


@pytest.fixture
def make(model_folder, engine, tmp_path):
    """Makes a rollout, whose policy is not the model that the engine has loaded."""

    def make(**options):
        options = {"max_prompt_length": 32, "max_completion_length": 8, **options}
        config = config_of(model_folder, tmp_path, rollout="vllm", **options)
        model, tokenizer = load_model(config)
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(1.25)
        return VLLMRollout(config, model, tokenizer, Accelerator(cpu=True))

    return make


def prompts_of(rollout):
    return [rollout.tokenizer(text).input_ids for text in PROMPTS]


def sample(rollout, sampling=SAMPLING, count=4):
    """Completions of the prompts, whose seeds are drawn anew."""
    torch.manual_seed(0)
    return rollout(prompts_of(rollout), count, sampling)


@torch.no_grad()
def logits_of(rollout, i, one):
    """[T, V], of the policy for the completion `one` of prompt `i`."""
    prompt = prompts_of(rollout)[i]
    logits = rollout.model(torch.tensor([[*prompt, *one.token_ids]])).logits[0]
    return logits[len(prompt) - 1 : -1].float()


def gap(rollout, done):
    """The largest one to the policy's log-probs, over the kept sets where there are some."""
    gaps = []
    for i, one in enumerate(done):
        logits = logits_of(rollout, i // 4, one)
        if one.support is not None:
            sizes, kept = one.support.offsets.diff(), torch.zeros_like(logits, dtype=torch.bool)
            rows = torch.arange(len(sizes)).repeat_interleave(sizes)
            kept[rows, one.support.token_ids.long()] = True
            assert torch.equal(kept.sum(1), sizes) and 1 <= sizes.min() <= sizes.max() <= 20
            logits = logits.masked_fill(~kept, -torch.inf)
        logps = logits.log_softmax(-1)[range(len(one.token_ids)), one.token_ids]
        gaps.append(float((torch.tensor(one.logps) - logps).abs().max()))
    return max(gaps)


@pytest.mark.parametrize(
    ("sampling", "options"), ((SAMPLING, {}), (MASKED, MASKS)), ids=("all ids", "kept sets")
)
def test_log_probs_are_those_of_the_policy_once_it_is_sent(sampling, options, make):
    rollout = make(**options)
    assert rollout.sampler_dtype == "float32"
    assert "gpu_memory_utilization" not in rollout.llm.options  # on a CPU
    assert gap(rollout, sample(rollout, sampling)) > 0.01
    rollout.update_weights()
    weights = extension.names_and_weights(rollout.model)
    assert rollout.llm.worker.loads == [{name: list(weight.shape) for name, weight in weights}]
    done = sample(rollout, sampling)
    assert gap(rollout, done) < 1e-4 and len({tuple(one.token_ids) for one in done}) == 12
    assert all(one.ended is (one.token_ids[-1] == 0) for one in done)
    assert all((one.support is None) is (sampling is SAMPLING) for one in done)
    # Again the same seeds, and all of vLLM's parameters are said.
    assert [one.token_ids for one in sample(rollout, sampling)] == [one.token_ids for one in done]
    params = rollout.llm.asked[-1]
    assert (params.repetition_penalty, params.min_tokens, params.ignore_eos) == (1.0, 0, True)


@pytest.mark.parametrize(("sampling", "options"), ((SAMPLING, {}), (MASKED, MASKS)))
def test_the_likeliest_completion_is_repeated(sampling, options, make):
    """An engine that returns masks wants a temperature above 0: one token is left then."""
    rollout = make(**options)
    rollout.update_weights()
    done = sample(rollout, replace(sampling, temperature=0.0, record_support=False), count=2)
    assert len(done) == 6 and done[::2] == done[1::2]
    assert all(one.logps is None and one.support is None for one in done)
    assert {p.temperature for p in rollout.llm.asked} == {1.0 if options else 0.0}
    for i, one in enumerate(done[::2]):
        assert one.token_ids == logits_of(rollout, i, one).argmax(-1).tolist()


def test_stop_strings_cut_log_probs_too(make):
    rollout = make()
    one = sample(rollout)[0]
    text = rollout.tokenizer.decode(one.token_ids[2:3])
    cut = sample(rollout, replace(SAMPLING, stop=(text,)))[0]
    n = len(cut.token_ids)
    assert n <= 3 and cut.ended
    assert (cut.token_ids, cut.logps) == (one.token_ids[:n], one.logps[:n])
    # And at the tokenizer's end, too.
    end = one.token_ids[2]
    rollout.tokenizer.eos_token = rollout.tokenizer.convert_ids_to_tokens(end)
    rollout = VLLMRollout(rollout.config, rollout.model, rollout.tokenizer, Accelerator(cpu=True))
    cut = sample(rollout)[0]
    assert cut.ended and cut.token_ids == one.token_ids[: one.token_ids.index(end) + 1]
    assert rollout.llm.asked[-1].stop_token_ids == [0, end]


def test_a_completion_ends_where_the_engine_says_so(make, engine, monkeypatch):
    """The engine's text may have a stop string that the text of the tokens alone lacks."""
    rollout, output = make(), engine._output

    def stopped(self, *args):
        return SimpleNamespace(**{**vars(output(self, *args)), "stop_reason": "</x>"})

    monkeypatch.setattr(engine, "_output", stopped)
    sampling = replace(SAMPLING, stop=("</x>",))
    assert all(one.ended for one in sample(rollout, sampling))


def test_weights_that_do_not_arrive_end_the_run(make, monkeypatch):
    rollout = make()
    monkeypatch.setattr(rollout.llm, "reset_prefix_cache", lambda: False)
    with pytest.raises(RolloutError, match="expected no request while weights are sent"):
        rollout.update_weights()

    def fails(weights_iterator):
        raise RuntimeError("no room")

    rollout.llm.worker.reload_weights = fails
    with pytest.raises(RolloutError, match="no room"):
        rollout.update_weights()
    with pytest.raises(RolloutError, match=r"failed to load before \(no room\): start vLLM again"):
        rollout.update_weights()


@pytest.mark.parametrize(
    ("about", "options", "message"),
    (
        ({"hidden_size": 576}, {}, "hidden_size 64; got 576"),
        ({"logprobs_mode": "raw"}, {}, "logprobs_mode 'processed_logprobs'; got 'raw'"),
        ({"dtype": "bfloat16"}, {}, "dtype 'float32'; got 'bfloat16'"),
        ({"sampling_mask": False}, MASKS, "sampling_mask True; got False"),
    ),
)
def test_another_engine_is_refused(about, options, message, make, engine):
    engine.about = about
    with pytest.raises(RolloutError, match=rf"vLLM: expected {message}"):
        make(**options)
    if options:
        assert make(replay_support=False, **options).sampler_dtype is None


WITHOUT_SETS = r"(?s)replay_support wants the sets .*--no_replay_support"


@pytest.mark.parametrize(
    ("options", "error", "message"),
    (
        (MASKS, "return_sampling_mask: sampling is not there", WITHOUT_SETS),
        *((x, "no memory left", "(?s)left.*vllm_gpu_memory_utilization") for x in (MASKS, {})),
        ({}, "no such sampling", "vLLM does not start: no such sampling$"),
    ),
)
def test_an_engine_that_does_not_start_says_what_to_do(
    options, error, message, make, engine, monkeypatch
):
    def fails(self, **_):
        raise ValueError(error)

    monkeypatch.setattr(engine, "__init__", fails)
    with pytest.raises(RolloutError, match=message):
        make(**options)
