"""Examples are files of one folder, which can be copied out of the checkout."""

import ast
import json
import os
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]
EXAMPLES = sorted((ROOT / "examples").glob("[a-z]*.py"))

pytestmark = pytest.mark.usefixtures("real_memory")


def imports_of(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_needs_its_folder_alone(path):
    assert "sys.path" not in path.read_text()
    others = {"examples", "benchmarks", "tests"}
    assert not {name.split(".")[0] for name in imports_of(path)} & others


@pytest.mark.slow
def test_waiting_threads_sleep_before_torch_is_imported():
    """Else a demo beside one busy process takes twice as long as it has to."""
    code = "import os, demo_model; print(os.environ['GOMP_SPINCOUNT'])"
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    env.pop("GOMP_SPINCOUNT", None)
    for own, count in (({}, "1000"), ({"GOMP_SPINCOUNT": "7"}, "7")):
        run = subprocess.run(
            [sys.executable, "-c", code], cwd=ROOT / "examples", env=env | own,
            capture_output=True, text=True, timeout=100,
        )  # fmt: skip
        assert run.stdout.strip() == count, run.stderr


@pytest.mark.slow
def test_a_copied_example_runs(tiny_model, tmp_path):
    shutil.copytree(ROOT / "examples", tmp_path / "mine")
    copied = tmp_path / "mine" / "train_additions.py"
    options = ["--steps", "1", "--prompts_per_step", "2", "--num_generations", "2"]
    run = subprocess.run(
        [sys.executable, copied, "--model", str(tiny_model), *options],
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True,
        timeout=300,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    assert (tmp_path / "runs" / "demo" / "report.html").exists()


def test_the_minimal_one_learns(tiny_model, capsys):
    """Here a model of a few thousand parameters learns to prefer the first half of ASCII."""
    path = ROOT / "examples" / "minimal_grpo.py"
    assert len(path.read_text().splitlines()) <= 130
    ours = {name for name in imports_of(path) if name.startswith("grpo_kernels")}
    calls = (
        "GRPOLossConfig", "completion_mask", "fused_grpo_loss", "group_advantages",
        "linear_logprobs",
    )  # fmt: skip
    assert ours == {f"grpo_kernels.{name}" for name in calls}
    run = runpy.run_path(str(path))
    run["main"].__globals__["reward"] = lambda text, total: sum(c < "@" for c in text) / 10
    options = ["--model", str(tiny_model), "--steps", "30", "--learning-rate", "3e-2"]
    history = run["main"](options)
    # Twice as much with any of several seeds.
    assert len(history) == 30 and sum(history[-5:]) > 1.4 * sum(history[:5]) > 0
    assert "ratio_max" in capsys.readouterr().out


def test_the_minimal_one_explains_its_loss(tiny_model, tmp_path, monkeypatch):
    """With the lines of its comment."""
    text = (ROOT / "examples" / "minimal_grpo.py").read_text()
    line, before = re.search("`(from grpo_kernels.explain .*?)`", text)[1], "\nfrom grpo_kernels"
    text = text.replace(before, f"\n{line}{before}", 1).replace("# e = ", "e = ")
    (tmp_path / "mine.py").write_text(text.replace("# e.write", "e.write"))
    monkeypatch.chdir(tmp_path)
    runpy.run_path("mine.py")["main"](["--model", str(tiny_model), "--steps", "1"])
    assert "<script>" in (tmp_path / "step.html").read_text()


@pytest.mark.parametrize("signal", ("full", pytest.param("top", marks=pytest.mark.slow), "sampled"))
def test_the_distilling_one_comes_closer(signal, tiny_model, capsys):
    """A model that sees solved sums before a question, and one that does not."""
    path = ROOT / "examples" / "distill.py"
    assert len(path.read_text().splitlines()) <= 140
    options = ["--model", str(tiny_model), "--steps", "15", "--learning-rate", "1e-3"]
    history = runpy.run_path(str(path))["main"]([*options, "--signal", signal])
    assert len(history) == 15 and 0 < sum(history[-3:]) < 0.7 * sum(history[:3])
    assert capsys.readouterr().out.count("held-out accuracy") == 4


class Sampled(Exception):
    """Ends an example at its first sampling."""


# A model's own options, as instruction-tuned models have them.
OWN = {
    "do_sample": True, "temperature": 0.7, "top_k": 20, "top_p": 0.8, "typical_p": 0.9,
    "repetition_penalty": 1.1, "no_repeat_ngram_size": 2, "min_new_tokens": 2,
    "suppress_tokens": [7],
}  # fmt: skip


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
    main = runpy.run_path(str(ROOT / "examples" / f"{name}.py"))["main"]
    with pytest.raises(Sampled) as sampled:
        main(["--model", str(folder)])
    assert sampled.value.args[0] == []  # nothing changes the logits


@pytest.fixture
def many_ends(tiny_model, tmp_path):
    """A model that ends at every second token, of which its tokenizer knows one; and these ends."""
    ends = [*range(2, 257, 2)]
    folder = with_generation_config(tiny_model, tmp_path / "many_ends", eos_token_id=ends)
    return folder, torch.tensor([0, *ends])


def counted_after_an_end(tokens, mask, ends):
    """The tokens that the mask keeps after an end; also checks that it keeps all before."""
    ended = torch.isin(tokens, ends).long()
    after = ended.cumsum(1) - ended > 0
    assert int(after.sum()) > 0 and mask[~after].all()
    return int((after & (mask != 0)).sum())


def test_the_minimal_one_ends_at_every_end(many_ends):
    folder, ends = many_ends
    run = runpy.run_path(str(ROOT / "examples" / "minimal_grpo.py"))
    loss, seen, texts = run["fused_grpo_loss"], [], []

    def spy(states, head, tokens, advantages, mask, **more):
        seen.append(counted_after_an_end(tokens, mask, ends))
        return loss(states, head, tokens, advantages, mask, **more)

    def reward(text, total):
        texts.append(text)
        return float(len(text) % 2)

    run["main"].__globals__.update(fused_grpo_loss=spy, reward=reward)
    run["main"](["--model", str(folder), "--steps", "1"])
    assert seen == [0, 0]
    # Neither the end nor what is after it is judged.
    assert len(texts) == 32 and not any("<eos>" in text for text in texts)


def test_the_distilling_one_ends_at_every_end(many_ends):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder, ends = many_ends
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    run = runpy.run_path(str(ROOT / "examples" / "distill.py"))
    torch.manual_seed(0)
    tokens, mask = run["completions_of"](model, tokenizer, [(1, 2)] * 16, sample=True)
    assert counted_after_an_end(tokens, mask, ends) == 0
