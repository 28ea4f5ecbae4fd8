"""The forecast of a run's memory and time; recipes in `examples/configs`, which fit their cards."""

import re
from dataclasses import replace

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, Qwen3MoeConfig

from grpo_kernels.training import TrainingConfig, memory, parse_config
from grpo_kernels.training.cards import CARDS
from grpo_kernels.training.step.policy import Batch, Policy
from tests.helpers.ranks import ROOT
from tests.helpers.tiny_models import COMMON, make_model

pytestmark = pytest.mark.usefixtures("real_memory")


def config_of(**options):
    return TrainingConfig(**{"model": "m", **options})


def experts():
    sizes = {"num_experts": 4, "num_experts_per_tok": 2, "head_dim": 16}
    return Qwen3MoeConfig(
        **{**COMMON, **sizes, "moe_intermediate_size": 16, "num_hidden_layers": 1}
    )


@pytest.mark.parametrize("family", ("llama", "qwen3_moe"))
def test_kept_activations_are_what_a_forward_keeps(family):
    """Counted on tensors without memory as on real ones."""
    config = config_of(
        max_prompt_length=24, max_completion_length=16, micro_batch_size=8, num_generations=4
    )
    made = AutoModelForCausalLM.from_config
    model, storages = (make_model(family) if family == "llama" else made(experts())).train(), {}
    predicted = memory.predict(config, model.config, gpu=False)
    assert predicted.weights == sum(4 * p.numel() for p in model.parameters())
    assert predicted.optimizer == 2 * predicted.gradients == 2 * predicted.weights
    own = {p.untyped_storage().data_ptr() for p in (*model.parameters(), *model.buffers())}

    def keep(x):
        storages[x.untyped_storage().data_ptr()] = x
        return x

    prompts = [[i + 1, *[5] * 23] for i in range(2)]
    batch = Batch.from_rows(prompts, [i // 4 for i in range(8)], [[7] * 16] * 8, 0)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        hidden = Policy(model).hidden(batch)
    assert hidden.requires_grad
    real = sum(x.untyped_storage().nbytes() for at, x in storages.items() if at not in own)
    assert predicted.activations == pytest.approx(real, rel=0.02)


def test_the_flops_of_experts_are_those_that_a_token_is_sent_to():
    shape = experts()
    sizes = dict(max_prompt_length=16, max_completion_length=8, num_generations=4)
    work = memory.predict(config_of(prompts_per_step=1, **sizes), shape).work
    H, heads, unit = shape.hidden_size, shape.num_attention_heads, shape.moe_intermediate_size
    layer = H * 16 * (2 * heads + 2) + H * 4 + 2 * 3 * H * unit
    forward = 2 * layer * (16 + 4 * 7)
    assert work.sampling - 2 * 4 * 8 * H * shape.vocab_size == forward
    assert work.updates["layers"] == 3 * forward


def test_the_prediction_follows_the_options():
    shape = make_model("llama").config

    def predicted(processes=1, **options):
        return memory.predict(config_of(prompts_per_step=4, **options), shape, processes=processes)

    base, halves = predicted(), predicted(dtype="bf16", beta=0.1)
    assert predicted(lora_rank=4).gradients < base.gradients / 4
    assert halves.weights == base.weights / 2 == halves.reference and base.reference == 0
    recomputed = predicted(gradient_checkpointing=True).activations
    # All of one layer, and the input of each.
    H, N, layers = shape.hidden_size, 16 * (512 + 256), shape.num_hidden_layers
    unshared = predicted(share_prompts=False).activations
    assert recomputed == pytest.approx(unshared / layers + layers * 2 * N * H, rel=0.01)
    assert predicted(micro_batch_size=4).activations < base.activations < unshared
    # No micro-batch is larger than an update, which has two of 16 completions.
    assert predicted(micro_batch_size=64, minibatches=2) == predicted(minibatches=2)
    # A process has all weights, and its share of the prompts.
    four = predicted(processes=4)
    assert (four.weights, 4 * four.kv_cache) == (base.weights, base.kv_cache)
    assert (base.buckets, four.buckets) == (0, base.gradients)
    assert replace(four, buckets=0).peak + four.buckets == four.peak


def test_the_flops_of_a_step_are_those_of_its_gemms():
    """A GEMM has two FLOPs per weight and token forward, and two for each gradient."""
    model = make_model("llama")
    H, V = model.lm_head.weight.shape[::-1]
    weights = sum(p.numel() for p in model.model.layers.parameters() if p.dim() == 2)
    options = dict(
        max_prompt_length=17, max_completion_length=8, num_generations=4, prompts_per_step=3,
        micro_batch_size=4,
    )  # fmt: skip

    def predicted(**more):
        work = memory.predict(config_of(**{**options, **more}), model.config).work
        updates = {name: count for name, count in work.updates.items() if count}
        return {**updates, "sampling": work.sampling}

    # Prompts once per group, without the last token of a completion, which predicts nothing.
    forward, logits = 2 * weights * 3 * (17 + 4 * 7), 2 * 12 * 8 * V * H
    base = {"layers": 3 * forward, "head": 3 * logits, "sampling": forward + logits}
    assert predicted() == base
    scores = {f"scores of the {x}": forward + logits for x in ("policy", "reference")}
    assert predicted(epochs_per_rollout=2, beta=0.1, minibatches=3) == base | scores | {
        "layers": 6 * forward, "head": 6 * logits
    }  # fmt: skip
    # The last micro-batch of a pass counts as a whole one.
    assert predicted(micro_batch_size=8)["layers"] == 2 * 3 * forward * 2 / 3
    assert predicted(off_policy_threshold=1.0)["head"] == 4 * logits  # two passes
    assert predicted(lora_rank=2)["head"] == 2 * logits
    recomputed, stored = (
        predicted(gradient_checkpointing=x, share_prompts=False)["layers"] for x in (True, False)
    )
    assert 3 * recomputed == 4 * stored


VLLM = ("--rollout", "vllm", "--gpu", "3090")


def status_of(*argv):
    try:
        memory.main([*argv])
    except SystemExit as end:  # which says whether it fits a card
        return end.code
    return 0


@pytest.mark.parametrize(
    ("flags", "status", "told"),
    (
        (("--gpu", "t4", "--prompts_per_step", "100000"), 1, ["does not fit into 15", "Smaller: "]),
        (VLLM, 0, ["kv cache                         0.00 GiB", "GiB less 38% for vLLM, "]),
        ((*VLLM, "--vllm_gpu_memory_utilization", "1.0"), 1, ["Smaller: "]),
        ((), 0, ["TFLOP"]),
        (("--gpu", "a100"), 0, ["Predicted, never measured: 100 steps take at least", "sampling"]),
    ),
)  # fmt: skip
def test_the_command_says_whether_it_fits(flags, status, told, tmp_path, capsys):
    make_model("llama").config.save_pretrained(tmp_path)
    assert status_of("--model", str(tmp_path), *flags) == status
    said = capsys.readouterr()
    assert all(text in said.out + said.err for text in told)


# Recipes

CONFIGS = ROOT / "examples/configs"
SHAPE = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
         "num_key_value_heads", "vocab_size", "tie_word_embeddings")  # fmt: skip
# The configs on the hub of the models that the recipes train.
MODELS = {
    "Qwen/Qwen2.5-0.5B-Instruct": (896, 4864, 24, 14, 2, 151936, True),
    "Qwen/Qwen2.5-1.5B-Instruct": (1536, 8960, 28, 12, 2, 151936, True),
    "Qwen/Qwen2.5-7B-Instruct": (3584, 18944, 28, 28, 4, 152064, False),
    "smollm2-135m": (576, 1536, 30, 9, 3, 49152, True),
}


def shape_of(name):
    options = dict(zip(SHAPE, MODELS[name], strict=True))
    return AutoConfig.for_model("qwen2", max_position_embeddings=32768, **options)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(path.name for path in CONFIGS.glob("*-*.yaml")))
def test_a_recipe_fits_its_card(name, capsys, tmp_path):
    """Predicts by the command in the recipe's header, which takes the recipe's own options."""
    header = "\n".join(x for x in (CONFIGS / name).read_text().split("\n") if x.startswith("#"))
    assert all(x in header for x in (f"examples/configs/{name}", "# reaches:", "# run:"))
    launched = re.search(r"--config_file (\S+)", header)
    assert launched is None or (ROOT / launched[1]).exists()
    config = parse_config([str(CONFIGS / name)])
    assert config.folder.name in name  # two recipes do not write into one folder
    # What comes due before the end.
    assert max(config.sync_ref_every, config.eval_every, config.warmup_steps) < config.steps
    flags = re.search(rf"^#   .*\.memory \S*{name} (.*)$", header, re.M)[1].split()
    if flags[0] == "--cpu":
        flags = flags[:1]  # without the folder of its model
    else:
        gib = CARDS[flags[1]].gib
        assert flags[0] == "--gpu" and any(f"{n}gb" in name for n in (int(gib), int(gib) + 1))
    shape_of(config.model).save_pretrained(tmp_path)
    with torch.device("meta"):
        assert torch.empty(0).is_meta  # or the model takes real memory
    status = status_of(str(CONFIGS / name), *flags, "--model", str(tmp_path))
    told = capsys.readouterr().out
    assert status == 0, told
