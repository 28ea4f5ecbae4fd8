"""Recipes in `examples/configs`: their options, and that they fit the cards that they name."""

import re

import pytest
from transformers import AutoConfig

from grpo_kernels.training import memory, parse_config
from grpo_kernels.training.config import TrainingConfig
from tests.helpers.ranks import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("real_memory")]
CONFIGS = ROOT / "examples/configs"
RECIPES = sorted(path.name for path in CONFIGS.glob("*gb*.yaml"))
# The configs on the hub of the models that the recipes train: hidden size, that of the MLP, layers,
# heads, heads of keys, vocabulary, whether the head is tied.
MODELS = {
    "Qwen/Qwen2.5-0.5B-Instruct": (896, 4864, 24, 14, 2, 151936, True),
    "Qwen/Qwen2.5-1.5B-Instruct": (1536, 8960, 28, 12, 2, 151936, True),
    "Qwen/Qwen2.5-7B-Instruct": (3584, 18944, 28, 28, 4, 152064, False),
}


def config_of(name):
    hidden, mlp, layers, heads, kv_heads, V, tied = MODELS[name]
    return AutoConfig.for_model(
        "qwen2", hidden_size=hidden, intermediate_size=mlp, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=kv_heads, vocab_size=V,
        tie_word_embeddings=tied, max_position_embeddings=32768,
    )  # fmt: skip


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
    layer = (494_032_768 - V * H - H) // 24
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
