"""Completions with tokens that the policy did not sample, which the model alone sees.

Their gradients are in `test_micro_batches.py`.
"""

import re
from itertools import chain

import pytest
import torch

from examples import tool_use
from grpo_kernels import Support
from grpo_kernels.explain.records import read_rows
from grpo_kernels.training import Completion, SamplingParams, load_model
from tests.helpers.ranks import ROOT
from tests.helpers.tiny_models import make_tokenizer
from tests.helpers.trainer_runs import FakeRollout, config_of, rows_of, trainer_of, weights_of

pytestmark = pytest.mark.usefixtures("real_memory")


@pytest.mark.parametrize("ce_weight", (None, 0.5))
def test_groups_of_equal_rewards_still_learn_to_predict(ce_weight, make):
    """Advantages are 0, and the cross-entropy is not."""
    trainer = make(
        steps=1, rollout=lambda _: FakeRollout((6,), turns=True, ce_weight=ce_weight),
        rewards={"noise": lambda completions: [1.0] * len(completions)},
    )  # fmt: skip
    before = weights_of(trainer)
    trainer.train()
    moved = any(not torch.equal(p, before[name]) for name, p in weights_of(trainer).items())
    assert moved == (ce_weight is not None)


@pytest.mark.parametrize(
    ("by_tool", "written", "paid"), ((0, "<answer>6</answer> it is", 1.0), (1, "so  it is", 0.0))
)
def test_what_is_judged_is_what_the_policy_wrote(by_tool, written, paid, tiny_model, tmp_path):
    """A tool, or the policy, says the answer; people and who asks for it see the whole."""
    seen, whole = set(), "so <answer>6</answer> it is"

    def noted(completions, transcripts, completion_ids):
        seen.update(zip(completions, transcripts, map(len, completion_ids), strict=True))
        return [0.0] * len(completions)

    config = config_of(
        tiny_model, tmp_path, rewards=["answer", "format", "noted"], steps=1,
        max_completion_length=40, skip_untrained=False,
    )  # fmt: skip
    problems = [{"prompt": f"{i}", "answer": "6"} for i in range(8)]
    model, tokenizer = load_model(config)

    def rollout(prompts, count, sampling):
        parts = [tokenizer.encode(text) for text in ("so ", "<answer>6</answer>", " it is")]
        own = [x for i, part in enumerate(parts) for x in [i != by_tool] * len(part)]
        return [Completion(list(chain(*parts)), True, sampled=own)] * (len(prompts) * count)

    folder = trainer_of(
        config, model, tokenizer, rewards={"noted": noted}, rollout=lambda _: rollout,
        problems=(problems[:4], problems[4:]),
    ).train()  # fmt: skip
    assert seen == {(written, whole, len(written))}
    (row,) = rows_of(folder)
    assert (row["reward/answer"], row["accuracy"]) == (2 * paid, paid)
    assert row["completion_length"] == len(written) and row["tokens"] == 16 * len(written)
    assert row["reward/format"] == pytest.approx(0.4 * paid)
    rows = [read_rows(folder / f"{name}.jsonl") for name in ("answers", "samples")]
    assert {row["completion"] for some in rows for row in some} == {whole}
    assert {(row["sampled"], row["correct"]) for row in rows[0]} == {(written, paid > 0)}


def test_a_rollout_may_ask_for_the_problems(make):
    """Runs the class that the page shows; problems that it changes are its copies."""
    page, there = (ROOT / "docs" / "training.md").read_text().split("## Turns and tools\n")[1], {}
    exec(re.search(r"```python\n(.*?)```", page, re.DOTALL)[1], there)

    class Changing(there["WithFacts"]):
        def __call__(self, prompts, count, sampling, problems):
            done = super().__call__(prompts, count, sampling, problems)
            problems[0]["facts"] = "changed"
            return done

    problems = [{"prompt": f"{i}?", "facts": f"<{i}>."} for i in range(4)]
    trainer = make(max_completion_length=12, steps=1, top_k=3, problems=(problems, ()))
    seen = []
    trainer.rollout = Changing(trainer.rollout, trainer.tokenizer)
    trainer.train(lambda row, samples: seen.append(samples))
    (samples,) = seen
    assert trainer.train_problems == problems
    for i, (text, transcript) in enumerate(zip(samples.texts, samples.transcripts, strict=True)):
        facts = samples.problems[i // 4]["facts"]
        assert facts in transcript and facts not in text
        flags = samples.completions[i].sampled
        assert flags.count(False) == len(facts) == 4
        assert samples.mask[i].tolist()[: len(flags)] == list(map(int, flags))
        sizes = samples.completions[i].support.offsets.diff()
        assert sizes.gt(0).tolist() == flags  # a set for each sampled token


# The example


class Scripted:
    """Says the next of its texts for each prompt, up to the room that there is."""

    def __init__(self, tokenizer, *texts):
        self.tokenizer, self.texts, self.asked = tokenizer, list(texts), []

    def update_weights(self):
        self.asked.append("weights")

    def __call__(self, prompts, count, sampling):
        assert sampling.stop == ("</answer>", "</calc>")
        self.asked += [self.tokenizer.decode(prompt) for prompt in prompts]
        said = [self.texts.pop(0) for _ in range(len(prompts) * count)]
        ids = [self.tokenizer.encode(text)[: sampling.max_new_tokens] for text in said]
        return [Completion(row, True, [-1.0] * len(row), support=kept(row)) for row in ids]


def kept(row):
    """Each token from itself and the id after it."""
    ids = torch.tensor(row, dtype=torch.int32)
    return Support(torch.stack([ids, ids + 1], 1).flatten(), torch.arange(len(row) + 1) * 2)


def test_a_completion_may_call_several_times():
    tokenizer = make_tokenizer()
    inner = Scripted(
        tokenizer, "<calc>8*17</calc>", "<answer>5</answer>",  # two of the first prompt
        "<calc>136*5</calc>", "<answer>680</answer>", "nobody asked",
    )  # fmt: skip
    rollout = tool_use.WithCalculator(inner, tokenizer)
    rollout.update_weights()
    called, other = rollout([tokenizer.encode("Q")], 2, SamplingParams(200, stop=("</answer>",)))
    first = "<calc>8*17</calc>\n<result>136</result>\n"
    text = first + "<calc>136*5</calc>\n<result>680</result>\n"
    assert tokenizer.decode(called.token_ids) == text + "<answer>680</answer>" and called.ended
    assert inner.asked[:4] == ["weights", "Q", "Q" + first, "Q" + text]
    own_ids = [i for i, mine in zip(called.token_ids, called.sampled, strict=True) if mine]
    assert tokenizer.decode(own_ids) == "<calc>8*17</calc><calc>136*5</calc><answer>680</answer>"
    assert len(called.logps) == len(called.token_ids) and set(called.logps) == {-1.0, 0.0}
    assert torch.equal(called.support.token_ids, kept(own_ids).token_ids)
    assert called.support.offsets.diff().tolist() == [2 * mine for mine in called.sampled]
    assert tokenizer.decode(other.token_ids) == "<answer>5</answer>" and all(other.sampled_flags)
