"""The examples, each on a model of a few thousand parameters."""

import json
import os
import re
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from transformers import AutoTokenizer

from examples import custom_reward, demo_model, tool_use, train_additions, train_gsm8k
from grpo_kernels.training import parse_config
from tests.helpers.ranks import ROOT
from tests.helpers.tiny_models import make_model, make_tokenizer

SMALL = (
    "--steps", "2", "--prompts_per_step", "2", "--num_generations", "2", "--eval_size", "3",
    "--max_completion_length", "5",
)  # fmt: skip


pytestmark = pytest.mark.usefixtures("real_memory")


RUNS = {
    "train_additions": (train_additions, ()),
    "train_gsm8k": (train_gsm8k, ("--max_prompt_length", "1000")),
    "custom_reward": (custom_reward, ()),
    "tool_use": (tool_use, ("--max_completion_length", "40")),
}


@pytest.mark.parametrize("name", RUNS)
def test_runs(name, tiny_model, tmp_path):
    example, options = RUNS[name]
    where = ("--model", str(tiny_model), "--output", str(tmp_path / "run"))
    folder = example.main([*where, *SMALL, *options])
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2]
    assert (folder / "report.html").exists()


# (flags, the folder's name, options)
BY_DATASET = (
    (
        ["word_problems:all_levels"], "word_problems",
        {"rewards": ["answer"], "max_completion_length": 32},
    ),
    (
        ["openai/gsm8k"], "gsm8k", {"stop": ["</answer>"], "max_completion_length": 128},
    ),
    # Flags are checked beside the defaults that they go with: two weights, two rewards.
    (
        ["a.jsonl", "--reward_weights", "1", "0.5"], "gsm8k",
        {"rewards": ["answer", "format"], "reward_weights": [1.0, 0.5]},
    ),
)  # fmt: skip


@pytest.mark.parametrize(("flags", "folder", "options"), BY_DATASET)
def test_defaults_by_dataset(flags, folder, options):
    config = train_gsm8k.config_of(["--model", "m", "--dataset", *flags])
    assert config.folder.name == folder
    assert {key: getattr(config, key) for key in options} == options


def test_a_reward_is_refused_before_a_model_is_loaded(capsys, tmp_path):
    flags = ["--model", "not/there", "--output", str(tmp_path / "run")]
    with pytest.raises(SystemExit) as ended:
        train_gsm8k.main([*flags, "--rewards", "breif"])
    assert ended.value.code == 2
    assert "rewards: expected some of answer, format" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("dataset", "longest"), (("examples.word_problems:all_levels", 32), ("openai/gsm8k", 128))
)
@pytest.mark.parametrize("flag", ("--print_config", "--print-config"))
def test_printed_options_are_those_of_the_dataset(flag, dataset, longest, capsys, tmp_path):
    """A file of them, given without more, is the same run."""
    flags = ["--model", "m", "--dataset", dataset]
    with pytest.raises(SystemExit):
        train_gsm8k.config_of([flag, *flags])
    (tmp_path / "run.yaml").write_text(capsys.readouterr().out)
    config = train_gsm8k.config_of([str(tmp_path / "run.yaml")])
    assert config == train_gsm8k.config_of(flags) and config.max_completion_length == longest


def test_the_demo_model_stands_for_its_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = demo_model.cache_folder()
    make_model("llama").save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    config = parse_config([], model=demo_model.MODEL, dataset="d")
    resolved = demo_model.resolved(config)
    assert resolved.model == str(folder)
    model, _ = demo_model.load_model(resolved)
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert "model.norm.weight" in trained and len(trained) > 1
    assert all(x == "model.norm.weight" or x.startswith("model.layers.1.") for x in trained)
    adapted, _ = demo_model.load_model(replace(resolved, lora_rank=2))
    assert any("layers.0." in name for name, p in adapted.named_parameters() if p.requires_grad)
    other = replace(config, model="some/model")
    assert demo_model.resolved(other) == other


def test_a_broken_conversion_leaves_nothing(monkeypatch, tmp_path, tiny_model):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder, seen = demo_model.cache_folder(), []

    def folders():
        return [path for path in folder.parent.iterdir() if path.is_dir()]

    def parts(gguf):
        seen.append(folders())
        if len(seen) == 1:
            raise KeyboardInterrupt
        return make_model("llama"), AutoTokenizer.from_pretrained(tiny_model)

    monkeypatch.setattr(demo_model, "_converted", parts)
    monkeypatch.setattr(demo_model, "_gguf_file", lambda: None)
    with pytest.raises(KeyboardInterrupt):
        demo_model.model_path()
    unfinished = folder.parent / f"{folder.name}.unfinished"
    unfinished.mkdir()  # of a process killed while it wrote
    (unfinished / "half").touch()
    assert demo_model.model_path() == demo_model.model_path() == folder
    assert seen == [[], [unfinished]] and not (folder / "half").exists()
    assert folders() == [folder]
    AutoTokenizer.from_pretrained(folder)


def test_with_trl(tiny_model, tmp_path):
    pytest.importorskip("trl", reason="needs the extra 'peers'")
    from examples import trl_gsm8k
    from tests.helpers.trl_runs import on_a_cpu

    logs = []
    for stock in ((), ("--stock",)):
        trainer = trl_gsm8k.main([*on_a_cpu(tiny_model, tmp_path), *stock])
        logs.append(trainer.state.log_history[0])
        assert logs[-1]["grad_norm"] > 1e-3
        assert type(trainer).__name__ == ("GRPOTrainer" if stock else "FusedGRPOTrainer")
    for name in ("loss", "grad_norm", "entropy", "rewards/format/mean"):
        assert logs[0][name] == pytest.approx(logs[1][name], abs=1e-5), name


@pytest.mark.parametrize(
    "recipe", sorted((ROOT / "examples/configs/trl").glob("*.yaml")), ids=lambda path: path.stem
)
def test_a_first_step_of_a_recipe_of_trl(recipe, tiny_model, tmp_path):
    """With a small model, and without vLLM; `tests/ranks` has the processes."""
    pytest.importorskip("trl", reason="needs the extra 'peers'")
    from examples import trl_gsm8k
    from tests.helpers.trl_runs import on_a_cpu

    header = recipe.read_text().split("output_dir:")[0]
    launched = re.search(r"--config_file (\S+)", header)
    assert launched is None or (ROOT / launched[1]).exists()
    assert str(recipe.relative_to(ROOT)) in header and "# run:" in header
    assert f"output_dir: runs/trl/{recipe.stem}\n" in recipe.read_text()
    trainer = trl_gsm8k.main(["--config", str(recipe), *on_a_cpu(tiny_model, tmp_path)])
    assert trainer.state.log_history[0]["grad_norm"] > 0
    adapted = any("lora" in name for name, _ in trainer.model.named_parameters())
    assert adapted == ("lora" in recipe.stem)


def test_with_lightning(tiny_model, tmp_path, monkeypatch):
    pytest.importorskip("lightning", reason="needs the extra 'lightning'")
    from examples import lightning_grpo

    rollouts, steps = [], []

    def noise(prompts, completions, **_):
        rollouts.append(completions)
        return [float(sum(map(ord, text)) % 7) for text in completions]

    original = lightning_grpo.GRPO.training_step

    def step(self, batch, index):
        loss = original(self, batch, index)
        off = [p for name, p in self.model.named_parameters() if "lora_B" in name]
        steps.append((loss.item(), dict(self.trainer.callback_metrics), off[0].abs().sum().item()))
        return loss

    monkeypatch.setattr(lightning_grpo, "addition", noise)
    monkeypatch.setattr(lightning_grpo.GRPO, "training_step", step)
    monkeypatch.chdir(tmp_path)
    options = ["--model", str(tiny_model), "--rollouts", "2", "--explain-every", "3"]
    trainer = lightning_grpo.main(options)
    assert {x.name for x in tmp_path.glob("*.html")} == {f"step-{i}.html" for i in (0, 3, 6)}
    # Two rollouts of 32, each seen twice in minibatches of 16.
    assert len(rollouts) == 2 and len(rollouts[0]) == 32 and trainer.global_step == len(steps) == 8
    assert steps[0][2] == 0 < steps[-1][2]
    ratios = [float(metrics["ratio_max"]) for _, metrics, _ in steps]
    # Each rollout is sampled from what the one before has made of the policy.
    assert ratios[0] == pytest.approx(1.0, abs=1e-4) == ratios[4]
    assert max(ratios[1:4]) > 1.001 < max(ratios[5:])
    assert abs(float(steps[0][1]["kl"])) < 1e-6 < float(steps[-1][1]["kl"])


@pytest.mark.nightly
def test_lightning_on_two_devices(tiny_model):
    pytest.importorskip("lightning", reason="needs the extra 'lightning'")
    options = ["--model", str(tiny_model), "--rollouts", "1", "--devices", "2"]
    done = subprocess.run(
        [sys.executable, "examples/lightning_grpo.py", *options], cwd=ROOT, capture_output=True,
        text=True, timeout=300, env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert "MEMBER: 2/2" in done.stderr + done.stdout


def test_the_one_of_lightning_ends_at_every_end(tiny_model, monkeypatch):
    pytest.importorskip("lightning", reason="needs the extra 'lightning'")
    from examples import lightning_grpo

    policy = lightning_grpo.GRPO(str(tiny_model))
    ends = [*range(2, 257, 2)]  # the tokenizer knows another one
    policy.model.generation_config.eos_token_id = ends
    tokenizer = AutoTokenizer.from_pretrained(tiny_model, padding_side="left")
    data = lightning_grpo.Rollouts(
        policy, tokenizer, [], lambda prompts, texts: [float(len(text)) for text in texts], count=1
    )
    torch.manual_seed(0)
    batch = data.sample([{"prompt": "1 + 1 ="}] * 16)
    mask = batch["mask"][:, 7:] != 0
    ended = torch.isin(batch["ids"][:, 7:], torch.tensor([0, *ends])).long()
    after = ended.cumsum(1) - ended > 0
    assert after.any() and torch.equal(mask, ~after)


def test_the_upper_half_of_the_demo_s_layers_is_trained():
    model = make_model("llama")
    demo_model.freeze_lower_half(model)
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert "model.norm.weight" in trained and "model.layers.1.mlp.up_proj.weight" in trained
    assert not any("layers.0" in name or "embed" in name for name in trained)
