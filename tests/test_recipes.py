"""Recipes in `examples/configs`: their options, and that they fit the cards that they name."""

import re

import pytest
import torch
from transformers import AutoModelForCausalLM

from grpo_kernels.training import memory, parse_config, shapes
from grpo_kernels.training.config import TrainingConfig
from tests.helpers.ranks import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("real_memory")]
CONFIGS = ROOT / "examples/configs"
RECIPES = sorted(path.name for path in CONFIGS.glob("*gb*.yaml"))
# Of the weights on the hub, as their pages count them.
PARAMETERS = {
    "Qwen/Qwen2.5-0.5B-Instruct": 494_032_768,
    "Qwen/Qwen2.5-1.5B": 1_543_714_304,
    "Qwen/Qwen2.5-Math-1.5B": 1_543_714_304,
    "Qwen/Qwen2.5-3B": 3_085_938_688,
    "Qwen/Qwen2.5-7B-Instruct": 7_615_616_512,
    "Qwen/Qwen2.5-14B": 14_770_033_664,
    "Qwen/Qwen2.5-32B": 32_763_876_352,
    "Qwen/Qwen3-0.6B-Base": 596_049_920,
    "Qwen/Qwen3-1.7B": 1_720_574_976,
    "Qwen/Qwen3-4B-Instruct-2507": 4_022_468_096,
    "Qwen/Qwen3-8B": 8_190_735_360,
    "Qwen/Qwen3-14B": 14_768_307_200,
    "Qwen/Qwen3-32B": 32_762_123_264,
    "meta-llama/Llama-3.2-1B-Instruct": 1_235_814_400,
    "meta-llama/Llama-3.2-3B": 3_212_749_824,
    "meta-llama/Llama-3.1-8B": 8_030_261_248,
    "HuggingFaceTB/SmolLM2-135M-Instruct": 134_515_008,
    "HuggingFaceTB/SmolLM2-360M": 361_821_120,
    "HuggingFaceTB/SmolLM2-1.7B": 1_711_376_384,
    "google/gemma-2-2b-it": 2_614_341_888,
    "google/gemma-2-9b": 9_241_705_984,
    "google/gemma-3-1b-it": 999_885_952,
}


@pytest.mark.parametrize("name", PARAMETERS)
def test_shapes_have_as_many_parameters_as_the_models(name):
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(shapes.config_of(name))
    model.tie_weights()
    assert sum(p.numel() for p in model.parameters()) == PARAMETERS[name]


def test_all_shapes_are_counted():
    counted = {str(shapes.config_of(name)) for name in PARAMETERS}
    assert len(counted) == len(shapes.SHAPES)
    assert shapes.config_of("Qwen/Qwen2.5-1.5B-Instruct-GGUF-of-mine") is None
    assert shapes.config_of("somebody/other-7b") is None


def test_processes_share_state_if_it_is_sharded():
    config = TrainingConfig(model="m", beta=0.1, prompts_per_step=16)
    shape = shapes.config_of("qwen2.5-0.5b")
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
    layer = (PARAMETERS["Qwen/Qwen2.5-0.5B-Instruct"] - V * H - H) // 24
    assert eight.weights == one.weights // 8 + 2 * (V * H + layer)


@pytest.mark.parametrize("count", ("0", "2.5", "x"))
def test_processes_are_whole(count):
    with pytest.raises(SystemExit, match="--processes: expected a whole number"):
        memory.main(["--model", "Qwen/Qwen2.5-0.5B", "--processes", count])


def header_of(name):
    return "\n".join(x for x in (CONFIGS / name).read_text().split("\n") if x.startswith("#"))


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_fits_its_card(name, capsys):
    """The forecast is that of the header, to a tenth of a GiB."""
    flags = re.search(r"^# memory: .*\.memory \S+ (.*)$", header_of(name), re.M)[1].split()
    with pytest.raises(SystemExit) as status:
        memory.main([str(CONFIGS / name), *flags])
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
