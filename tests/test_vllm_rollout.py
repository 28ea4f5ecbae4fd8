"""`VLLMRollout` beside a small engine in vLLM's place; `tests/vllm` has the real one."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator

from grpo_kernels.integrations import vllm as extension
from grpo_kernels.training import load_model
from grpo_kernels.training.rollout import RolloutError, SamplingParams
from grpo_kernels.training.vllm_rollout import VLLMRollout, engine_options
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
def logits_of(rollout, prompt, ids):
    """[T, V], of the policy."""
    logits = rollout.model(torch.tensor([[*prompt, *ids]])).logits[0]
    return logits[len(prompt) - 1 : -1].float()


def test_log_probs_are_those_of_the_policy_once_it_is_sent(make):
    rollout = make()

    def gap(done):
        gaps = []
        for i, one in enumerate(done):
            logps = logits_of(rollout, prompts_of(rollout)[i // 4], one.token_ids).log_softmax(-1)
            mine = logps.gather(1, torch.tensor(one.token_ids)[:, None])[:, 0]
            gaps.append(float((torch.tensor(one.logps) - mine).abs().max()))
        return max(gaps)

    assert gap(sample(rollout)) > 0.01
    rollout.update_weights()
    weights = extension.names_and_weights(rollout.model)
    assert rollout.llm.worker.loads == [{name: list(weight.shape) for name, weight in weights}]
    done = sample(rollout)
    assert gap(done) < 1e-4 and len({tuple(one.token_ids) for one in done}) == 12
    assert all(one.ended is (one.token_ids[-1] == 0) and one.support is None for one in done)
    # Again the same seeds, and all of vLLM's parameters are said.
    assert [one.token_ids for one in sample(rollout)] == [one.token_ids for one in done]
    asked = rollout.llm.asked[-1]
    assert (asked.repetition_penalty, asked.min_tokens, asked.ignore_eos) == (1.0, 0, True)


@pytest.mark.parametrize(("sampling", "options"), ((SAMPLING, {}), (MASKED, MASKS)))
def test_the_likeliest_completion_is_repeated(sampling, options, make):
    """An engine that returns masks wants a temperature above 0: one token is left then."""
    rollout = make(**options)
    rollout.update_weights()
    done = sample(rollout, replace(sampling, temperature=0.0, record_support=False), count=2)
    assert len(done) == 6 and done[::2] == done[1::2]
    assert all(one.logps is None and one.support is None for one in done)
    assert {p.temperature for p in rollout.llm.asked} == {1.0 if options else 0.0}
    for prompt, one in zip(prompts_of(rollout), done[::2], strict=True):
        assert one.token_ids == logits_of(rollout, prompt, one.token_ids).argmax(-1).tolist()


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


def test_kept_sets_reach_the_completions(make):
    rollout = make(**MASKS)
    rollout.update_weights()
    for i, one in enumerate(sample(rollout, MASKED)):
        prompt = prompts_of(rollout)[i // 4]
        logits, ids, offsets = logits_of(rollout, prompt, one.token_ids), *one.support
        assert len(offsets) == len(one.token_ids) + 1 and len(one.logps) == len(one.token_ids)
        for t, token in enumerate(one.token_ids):
            kept = ids[offsets[t] : offsets[t + 1]].long()
            assert token in kept and 1 <= len(set(kept.tolist())) == len(kept) <= 20
            logp = float(logits[t, kept].log_softmax(-1)[kept == token])
            assert one.logps[t] == pytest.approx(logp, abs=1e-4)


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
        assert make(replay_support=False, **options).why_gap is None


def test_adapters_that_vllm_cannot_have_are_refused_before_it_starts(make, engine):
    with pytest.raises(ValueError, match="model: expected no adapter on a tied output layer"):
        make(lora_rank=2, lora_target=r".*(q_proj|lm_head)")
    assert engine.made == []


@pytest.mark.parametrize(
    ("version", "warned"), (("0.28.0", False), ("0.32.1", False), ("0.27.4", True), ("1.0.0", True))
)
def test_an_untried_version_is_told(version, warned, make, engine, capsys):
    engine.about = {"vllm": version}
    make()
    told = capsys.readouterr().out
    assert f"Completions by vLLM {version} in this process, float32" in told
    assert (f"vLLM {version} is not tested" in told) is warned


def test_an_engine_that_does_not_start_says_what_to_do(make, engine, monkeypatch):
    def fails(self, **options):
        raise ValueError(
            "return_sampling_mask: sampling is not there" if "return_sampling_mask" in options
            else "no memory left"
        )  # fmt: skip

    monkeypatch.setattr(engine, "__init__", fails)
    with pytest.raises(RolloutError, match=r"replay_support wants the sets .*--no_replay_support"):
        make(**MASKS)
    with pytest.raises(RolloutError, match=r"(?s)no memory left.*vllm_gpu_memory_utilization"):
        make()


def test_a_cpu_has_the_cache_that_all_rows_need(model_folder):
    """Two blocks of 32 for 40 tokens, one more, and a sequence more than there are."""
    lengths = {"max_prompt_length": 24, "max_completion_length": 16}
    config = config_of(model_folder, "x", rollout="vllm", **lengths)
    options = engine_options(config, 6, False)
    # 2 layers of one head of 32 numbers, keys and values, 4 bytes each.
    assert options["kv_cache_memory_bytes"] == 7 * 3 * 32 * (2 * 2 * 32 * 4)
    assert options["max_model_len"] == 40 and options["block_size"] == 32
    options = engine_options(config, 6, True)
    assert not {"kv_cache_memory_bytes", "revision"} & options.keys()
    options = engine_options(replace(config, model="owner/name@v1"), 6, True)
    assert (options["model"], options["revision"]) == ("owner/name", "v1")
