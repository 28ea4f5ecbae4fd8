"""Recipes in `examples/configs`: their options, and that they fit the cards that they name."""

import re

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from grpo_kernels.training import memory, parse_config
from grpo_kernels.training.config import TrainingConfig
from tests.helpers.ranks import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("real_memory")]
CONFIGS = ROOT / "examples/configs"
RECIPES = sorted(path.name for path in CONFIGS.glob("*gb*.yaml"))
# The configs on the hub of the models that the recipes train: kind, hidden size, that of the MLP,
# layers, heads, heads of keys, vocabulary, whether the head is tied; and the count of parameters.
MODELS = {
    "Qwen/Qwen2.5-0.5B-Instruct": ("qwen2", 896, 4864, 24, 14, 2, 151936, True, 494_032_768),
    "Qwen/Qwen2.5-1.5B-Instruct": ("qwen2", 1536, 8960, 28, 12, 2, 151936, True, 1_543_714_304),
    "Qwen/Qwen2.5-7B-Instruct": ("qwen2", 3584, 18944, 28, 28, 4, 152064, False, 7_615_616_512),
}


def config_of(name):
    kind, hidden, mlp, layers, heads, kv_heads, V, tied, _ = MODELS[name]
    return AutoConfig.for_model(
        kind, hidden_size=hidden, intermediate_size=mlp, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=kv_heads, vocab_size=V,
        tie_word_embeddings=tied, max_position_embeddings=32768,
    )  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_the_configs_are_those_of_the_models(name):
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config_of(name))
    model.tie_weights()
    assert sum(p.numel() for p in model.parameters()) == MODELS[name][-1]


def test_processes_share_state_if_it_is_sharded():
    config = TrainingConfig(model="m", beta=0.1, prompts_per_step=16)
    shape = config_of("Qwen/Qwen2.5-0.5B-Instruct")
    one = memory.predict(config, shape)
    for sharded in (False, True):
        eight = memory.predict(config, shape, processes=8, sharded=sharded)
        for name in ("gradients", "optimizer", "reference"):
            assert getattr(one, name) == getattr(eight, name) * (8 if sharded else 1), name
        assert eight.cache * 8 == one.cache and eight.activations == one.activations
        if not sharded:
            assert eight.weights == one.weights
    # Beside its eighth: the head, and one layer of 24, in bf16.
    V, H = shape.vocab_size, shape.hidden_size
    layer = (MODELS["Qwen/Qwen2.5-0.5B-Instruct"][-1] - V * H - H) // 24
    assert eight.weights == one.weights // 8 + 2 * (V * H + layer)


@pytest.mark.parametrize("count", ("0", "2.5", "x"))
def test_processes_are_whole(count, capsys):
    with pytest.raises(SystemExit):
        memory.main(["--model", "Qwen/Qwen2.5-0.5B", "--processes", count])
    assert "processes" in capsys.readouterr().err


def header_of(name):
    return "\n".join(x for x in (CONFIGS / name).read_text().split("\n") if x.startswith("#"))


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_fits_its_card(name, capsys, tmp_path):
    """The forecast is that of the header, to a tenth of a GiB."""
    flags = re.search(r"^# memory: .*\.memory \S+ (.*)$", header_of(name), re.M)[1].split()
    config_of(parse_config([str(CONFIGS / name)]).model).save_pretrained(tmp_path)
    with pytest.raises(SystemExit) as status:
        memory.main([str(CONFIGS / name), *flags, "--model", str(tmp_path)])
    told = capsys.readouterr().out
    assert status.value.code == 0, told
    peak = float(re.search(r"^peak +([\d.]+) GiB", told, re.M)[1])
    expected = float(re.search(r"^#   a peak of ([\d.]+) GiB", header_of(name), re.M)[1])
    assert peak == pytest.approx(expected, abs=0.1)
    assert f"{flags[1]}gb" in name


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_says_what_it_is(name):
    config, header = parse_config([str(CONFIGS / name)]), header_of(name)
    assert isinstance(config, TrainingConfig) and f"examples/configs/{name}" in header
    for word in ("# reaches:", "# run:"):
        assert word in header, word
    launched = re.search(r"--config_file (\S+)", header)
    assert launched is None or (ROOT / launched[1]).exists()
    # Its own name: two recipes do not write into one folder.
    assert config.name in name


def test_there_is_one_for_the_machines_that_people_have():
    kinds = [header_of(name).split("\n")[0] for name in RECIPES]
    assert len(RECIPES) == 6 and len(set(kinds)) == 6
