"""The examples, each run once on a model of a few thousand parameters, and what each promises."""

import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from functools import partial
from importlib import import_module

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from examples import demo_model, train_gsm8k
from grpo_kernels.training import parse_config
from tests.helpers.examples import example
from tests.helpers.fake_server import Teacher, serving
from tests.helpers.ranks import ROOT
from tests.helpers.tiny_models import make_model, make_tokenizer

EXAMPLES = sorted((ROOT / "examples").glob("[a-z]*.py"))
SMALL = (
    "--steps", "2", "--prompts_per_step", "2", "--num_generations", "2", "--eval_size", "3",
    "--max_completion_length", "5",
)  # fmt: skip

pytestmark = pytest.mark.usefixtures("real_memory")


def test_examples_need_their_folder_alone():
    for path in EXAMPLES:
        others = r"^\s*(from|import) (examples|benchmarks|tests)\b|sys\.path"
        assert not re.search(others, path.read_text(), re.M), path


# Runs, by the arguments that follow the model


def trains(name, *options, model, folder):
    """Runs one that makes a run of our trainer."""
    argv = ["--model", str(model), "--output", str(folder / "run"), *SMALL, *options]
    done = import_module(f"examples.{name}").main(argv)
    rows = [json.loads(line) for line in (done / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2]
    assert (done / "report.html").exists()
    # Only a run whose model is to be used keeps weights: with AdamW's state they are 600 MB.
    kept = {path.suffix for path in done.rglob("*")} & {".pt", ".safetensors"}
    assert kept == ({".pt", ".safetensors"} if name == "train_gsm8k" else set())


def learns(*, model, folder):
    """A model of a few thousand parameters learns to prefer the first half of ASCII."""
    main = example("minimal_grpo", reward=lambda text, _: sum(c < "@" for c in text) / 10)["main"]
    history = main(["--model", str(model), "--steps", "30", "--learning-rate", "3e-2"])
    # Twice as much with any of several seeds.
    assert len(history) == 30 and sum(history[-5:]) > 1.4 * sum(history[:5]) > 0


def distils(signal, *, model, folder):
    """A model that sees solved sums before a question, and one that does not, come closer."""
    options = ["--model", str(model), "--steps", "15", "--learning-rate", "1e-3"]
    history = example("distill")["main"]([*options, "--signal", signal])
    assert len(history) == 15 and 0 < sum(history[-3:]) < 0.7 * sum(history[:3])


def distils_from_a_server(ids, *, model, folder):
    """Runs one whose teacher is behind an address: the models come closer."""
    options = ["--model", str(model), "--steps", "5", "--learning-rate", "1e-3", "--ids", ids]
    with serving(Teacher(model)) as address:
        history = example("distill_served")["main"]([*options, "--server", address])
    assert len(history) == 5 and 0 < history[-1] < 0.7 * history[0]


def trains_by_trl(*, model, folder):
    """The same first step with TRL's own head."""
    pytest.importorskip("trl", reason="needs the extra 'peers'")
    from tests.helpers.trl_runs import on_a_cpu

    logs = []
    for stock in ((), ("--stock",)):
        trainer = example("trl_gsm8k")["main"]([*on_a_cpu(model, folder), *stock])
        logs.append(trainer.state.log_history[0])
        assert logs[-1]["grad_norm"] > 1e-3
        assert type(trainer).__name__ == ("GRPOTrainer" if stock else "FusedGRPOTrainer")
    for name in ("loss", "grad_norm", "entropy", "rewards/format/mean"):
        assert logs[0][name] == pytest.approx(logs[1][name], abs=1e-5), name


def trains_by_a_recipe(*, model, folder):
    """A first step without vLLM; `tests/ranks` has the recipes for several GPUs."""
    pytest.importorskip("trl", reason="needs the extra 'peers'")
    from tests.helpers.trl_runs import on_a_cpu

    recipe = str(ROOT / "examples/configs/trl/qwen2.5-1.5b-lora-24gb-vllm.yaml")
    trainer = example("trl_gsm8k")["main"](["--config", recipe, *on_a_cpu(model, folder)])
    assert trainer.state.log_history[0]["grad_norm"] > 0
    assert any("lora" in name for name, _ in trainer.model.named_parameters())


def trains_by_lightning(*, model, folder):
    pytest.importorskip("lightning", reason="needs the extra 'lightning'")
    rollouts, steps = [], []

    def noise(prompts, completions, **_):
        rollouts.append(completions)
        return [float(sum(map(ord, text)) % 7) for text in completions]

    run = example("lightning_grpo", addition=noise)
    original = run["GRPO"].training_step

    def step(self, batch, index):
        loss = original(self, batch, index)
        off = [p for name, p in self.model.named_parameters() if "lora_B" in name]
        steps.append((dict(self.trainer.callback_metrics), off[0].abs().sum().item()))
        return loss

    run["GRPO"].training_step = step
    trainer = run["main"](["--model", str(model), "--rollouts", "2", "--explain-every", "3"])
    assert {x.name for x in folder.glob("*.html")} == {f"step-{i}.html" for i in (0, 3, 6)}
    # Two rollouts of 32, each seen twice in minibatches of 16.
    assert len(rollouts) == 2 and len(rollouts[0]) == 32 and trainer.global_step == len(steps) == 8
    assert steps[0][1] == 0 < steps[-1][1]
    ratios = [float(metrics["ratio_max"]) for metrics, _ in steps]
    # Each rollout is sampled from what the one before has made of the policy.
    assert ratios[0] == pytest.approx(1.0, abs=1e-4) == ratios[4]
    assert max(ratios[1:4]) > 1.001 < max(ratios[5:])
    assert abs(float(steps[0][0]["kl"])) < 1e-6 < float(steps[-1][0]["kl"])


RUNS = {
    "train_additions": partial(trains, "train_additions"),
    "train_gsm8k": partial(trains, "train_gsm8k", "--max_prompt_length", "1000"),
    "custom_reward": partial(trains, "custom_reward"),
    "tool_use": partial(trains, "tool_use", "--max_completion_length", "40"),
    "minimal_grpo": learns,
    **{f"distill, {signal}": partial(distils, signal) for signal in ("full", "top", "sampled")},
    **{
        f"distill_served, {ids}": partial(distils_from_a_server, ids)
        for ids in ("teacher", "student")
    },
    "trl_gsm8k": trains_by_trl,
    "qwen2.5-1.5b-lora-24gb-vllm": trains_by_a_recipe,
    "lightning_grpo": trains_by_lightning,
}


@pytest.mark.parametrize("name", RUNS)
def test_runs(name, tiny_model, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    RUNS[name](model=tiny_model, folder=tmp_path)


def in_a_process(*command, **options):
    """Output of examples that run by themselves."""
    done = subprocess.run(
        [sys.executable, *map(str, command)], capture_output=True, text=True, timeout=300, **options
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout + done.stderr


def test_a_copied_example_runs(tiny_model, tmp_path):
    """Waiting threads sleep before torch is imported.

    Else a demo beside one busy process takes twice as long as it has to.
    """
    shutil.copytree(ROOT / "examples", tmp_path / "mine")
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    env.pop("GOMP_SPINCOUNT", None)
    code = "import os, sys, train_additions; train_additions.main(sys.argv[1:])"
    code += "; print(os.environ['GOMP_SPINCOUNT'])"
    options = ["--steps", "1", "--prompts_per_step", "2", "--num_generations", "2"]
    options += ["--eval_size", "2", "--model", tiny_model, "--output", tmp_path / "run"]
    said = in_a_process("-c", code, *options, cwd=tmp_path / "mine", env=env)
    assert "1000" in said.split() and (tmp_path / "run" / "report.html").exists()


# The policy that samples is the one that is trained


class Sampled(Exception):
    """Ends an example at its first sampling."""


# A model's own options, as instruction-tuned models have them.
OWN = {
    "do_sample": True, "temperature": 0.7, "top_k": 20, "top_p": 0.8, "typical_p": 0.9,
    "repetition_penalty": 1.1, "no_repeat_ngram_size": 2, "min_new_tokens": 2,
    "suppress_tokens": [7],
}  # fmt: skip
ENDS = [*range(2, 257, 2)]  # of which a tokenizer knows none


def with_generation_config(model, folder, **options):
    """A copy of the model with these options of its own."""
    shutil.copytree(model, folder)
    path = folder / "generation_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **options}))
    return folder


@pytest.mark.parametrize("name", ("minimal_grpo", "distill", "lightning_grpo"))
def test_examples_sample_from_the_policy_that_they_train(name, tiny_model, tmp_path, monkeypatch):
    """A temperature or a penalty would make the samples another policy's, at a ratio of 1."""
    from transformers import GenerationMixin

    if name == "lightning_grpo":
        pytest.importorskip("lightning", reason="needs the extra 'lightning'")

    def sample(self, input_ids, logits_processor, **options):
        raise Sampled([type(x).__name__ for x in logits_processor])

    monkeypatch.setattr(GenerationMixin, "_sample", sample)
    folder = with_generation_config(tiny_model, tmp_path / "own", **OWN)
    with pytest.raises(Sampled) as sampled:
        example(name)["main"](["--model", str(folder)])
    assert sampled.value.args[0] == []  # nothing changes the logits


def ends_of_minimal(run, folder, tokenizer):
    """Yields tokens and masks, and checks that what follows an end is not judged."""
    loss, seen, texts = run["fused_grpo_loss"], [], []

    def spy(states, head, tokens, advantages, mask, **more):
        seen.append((tokens, mask))
        return loss(states, head, tokens, advantages, mask, **more)

    def reward(text, total):
        texts.append(text)
        return float(len(text) % 2)

    run["main"].__globals__.update(fused_grpo_loss=spy, reward=reward)
    run["main"](["--model", str(folder), "--steps", "1"])
    assert len(texts) == 32 and not any("<eos>" in text for text in texts)
    return seen


def ends_of_distill(run, folder, tokenizer):
    model = AutoModelForCausalLM.from_pretrained(folder)
    return [run["completions_of"](model, tokenizer, [(1, 2)] * 16, sample=True)]


def ends_of_lightning(run, folder, tokenizer):
    data = run["Rollouts"](
        run["GRPO"](str(folder)), tokenizer, [], lambda _, texts: list(map(float, map(len, texts))),
        count=1,
    )  # fmt: skip
    batch = data.sample([{"prompt": "1 + 1 ="}] * 16)
    return [(batch["ids"][:, 7:], batch["mask"][:, 7:])]


@pytest.mark.parametrize("ends", (ends_of_minimal, ends_of_distill, ends_of_lightning))
def test_a_completion_ends_at_every_end(ends, tiny_model, tmp_path):
    name = {"ends_of_minimal": "minimal_grpo", "ends_of_distill": "distill"}
    name = name.get(ends.__name__, "lightning_grpo")
    if name == "lightning_grpo":
        pytest.importorskip("lightning", reason="needs the extra 'lightning'")
    folder = with_generation_config(tiny_model, tmp_path / "many_ends", eos_token_id=ENDS)
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    for tokens, mask in ends(example(name), folder, tokenizer):
        ended = torch.isin(tokens, torch.tensor([0, *ENDS])).long()
        after = ended.cumsum(1) - ended > 0
        assert after.any() and torch.equal(mask != 0, ~after)


@pytest.mark.parametrize("signal", ("full", "top"))
def test_distill_knows_a_softcap(signal, tmp_path):
    """A teacher that sees no more than the student is the student."""
    make_model("gemma2", final_logit_softcapping=1.0).save_pretrained(tmp_path)
    make_tokenizer().save_pretrained(tmp_path)
    run, seen = example("distill", SHOWN=""), []
    loss_of = run["loss_of"]

    def spy(signal, states, head, teacher, ids):
        loss = loss_of(signal, states, head, teacher, ids)
        seen.append((head.softcap, teacher.head.softcap, abs(loss.item()) < 1e-6))
        return loss

    run["main"].__globals__["loss_of"] = spy
    run["main"](["--model", str(tmp_path), "--steps", "1", "--signal", signal])
    assert seen == [(1.0, 1.0, True)]


# Options of `train_gsm8k`, and the model of the demo


def test_defaults_by_dataset(capsys, tmp_path):
    """A file of the printed options, given without more, is the same run."""
    flags = ["--model", "m", "--dataset", "word_problems:all_levels"]
    config = train_gsm8k.config_of(flags)
    assert config.folder.name == "word_problems" and config.max_completion_length == 32
    with pytest.raises(SystemExit):
        train_gsm8k.config_of(["--print-config", *flags])
    (tmp_path / "run.yaml").write_text(capsys.readouterr().out)
    assert train_gsm8k.config_of([str(tmp_path / "run.yaml")]) == config
    # Flags are checked beside the defaults that they go with: two weights, two rewards.
    config = train_gsm8k.config_of([*flags[:3], "a.jsonl", "--reward_weights", "1", "0.5"])
    assert config.folder.name == "gsm8k" and config.rewards == ["answer", "format"]


def test_the_demo_model_stands_for_its_folder(monkeypatch, tmp_path):
    """The upper half of its layers is trained, or adapters of all."""
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


def test_without_a_home_the_demo_asks_for_a_folder(monkeypatch, tmp_path):
    """A container's user may have none; other models do not need it."""
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("HOME")
    monkeypatch.setattr("os.getuid", lambda: 12345)
    monkeypatch.chdir(tmp_path)
    asks = r"smollm2-135m has no folder to be kept in \(.*\): set XDG_CACHE_HOME"
    with pytest.raises(OSError, match=asks):
        demo_model.model_path()
    assert not demo_model.cache_folder().exists() and not [*tmp_path.iterdir()]
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(OSError, match=asks):
        demo_model.model_path()


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
