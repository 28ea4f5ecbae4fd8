"""The forecast of a run's memory."""

import pytest
import torch

from grpo_kernels.training import TrainingConfig, memory
from grpo_kernels.training.policy import Batch, Policy
from grpo_kernels.training.vllm_server import engine_options
from tests.helpers.tiny_models import make_model

pytestmark = pytest.mark.usefixtures("real_memory")


def config_of(**options):
    return TrainingConfig(**{"model": "m", **options})


def test_kept_activations_are_what_a_forward_keeps():
    """Counted on tensors without memory as on real ones."""
    config = config_of(
        max_prompt_length=24, max_completion_length=16, micro_batch_size=8, num_generations=4
    )
    model, storages = make_model("llama").train(), {}
    predicted = memory.predict(config, model.config, gpu=False)
    assert predicted.weights == sum(4 * p.numel() for p in model.parameters())
    assert predicted.optimizer == 2 * predicted.gradients == 2 * predicted.weights
    own = {p.untyped_storage().data_ptr() for p in (*model.parameters(), *model.buffers())}

    def keep(x):
        storages[x.untyped_storage().data_ptr()] = x
        return x

    prompts = [[i + 1, *[5] * 23] for i in range(2)]
    batch = Batch.of_rows(prompts, [i // 4 for i in range(8)], [[7] * 16] * 8, 0)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        hidden = Policy(model).hidden(batch)
    assert hidden.requires_grad
    real = sum(x.untyped_storage().nbytes() for at, x in storages.items() if at not in own)
    assert predicted.activations == pytest.approx(real, rel=0.02)


def test_the_prediction_follows_the_options():
    config = make_model("llama").config

    def predicted(**options):
        return memory.predict(config_of(**options), config)

    base = predicted()
    assert predicted(lora_rank=4).gradients < base.gradients / 4
    assert predicted(beta=0.1).reference == base.weights and base.reference == 0
    assert predicted(trainable=r"layers\.1").gradients < base.gradients
    assert predicted(dtype="bf16").weights == base.weights / 2
    assert predicted(gradient_checkpointing=True).activations < base.activations
    assert predicted(share_prompts=False).activations > base.activations
    assert predicted(micro_batch_size=4).activations < base.activations
    assert base.peak <= base.eager_peak


def vllm_prediction(*, gpu=True, **options):
    config = config_of(rollout="vllm", max_prompt_length=24, max_completion_length=16, **options)
    return memory.predict(config, make_model("llama").config, gpu=gpu, gpu_bytes=2**24)


def test_what_vllm_takes_of_a_gpu():
    """Its share beside training; that of the larger of both if it sleeps; elsewhere by itself."""
    weights = sum(p.numel() for p in make_model("llama").parameters())
    awake, asleep = vllm_prediction(), vllm_prediction(vllm_enable_sleep_mode=True)
    engine = awake.engine
    assert awake.cache == awake.sampling == 0
    assert engine.weights == 2 * weights  # as the GEMMs of the policy, bf16 by autocast
    assert engine.sampling == engine.training == int(0.3 * 2**24)
    # 2 layers of one head of 16 numbers, keys and values, 40 tokens.
    assert engine.sequence == 2 * 2 * 16 * 40 * 2
    assert engine.sequences == (engine.share - engine.weights) // engine.sequence
    assert vllm_prediction(vllm_dtype="fp32").engine.weights == 4 * weights
    assert asleep.training_peak == awake.training_peak - engine.share
    there = (asleep.training_peak, asleep.state + asleep.engine.share + asleep.engine.sync)
    assert asleep.peak == max(there)
    # Adapters are merged into what is sent.
    server = vllm_prediction(vllm_mode="server", lora_rank=4)
    assert server.peak == server.training_peak and server.engine.training == 0
    assert server.engine.sync_files == server.engine.weights == 2 * weights
    lines = server.table().splitlines()
    peak = next(i for i, line in enumerate(lines) if line.startswith("peak"))
    assert [line.startswith("server") for line in lines[peak:]] == [0, 0, 1, 1, 0, 0]


def test_a_vllm_on_a_cpu_holds_the_cache_that_it_is_given(tmp_path):
    """And packed copies of the head and of the embedding."""
    make_model("llama").config.save_pretrained(tmp_path)
    options = {"model": str(tmp_path), "precision": "no"}
    engine = vllm_prediction(gpu=False, **options).engine
    config = config_of(rollout="vllm", max_prompt_length=24, max_completion_length=16, **options)
    rows = config.prompts_per_step * config.num_generations
    assert engine.cache == engine_options(config, rows, False)["kv_cache_memory_bytes"]
    # Two blocks of 32 for 40 tokens, one more, and a sequence more than there are; bytes per token.
    assert engine.cache == (rows + 1) * 3 * 32 * (2 * 2 * 16 * 4)
    parameters = [p.numel() for p in make_model("llama").parameters()]
    assert engine.weights == 4 * (sum(parameters) + 2 * max(parameters))
    assert engine.sampling == engine.weights + engine.cache


VLLM = ("--rollout", "vllm", "--gpu-gib", "1")


@pytest.mark.parametrize(
    ("flags", "status", "told"),
    (
        (("--dtype", "bf16", "--lora-rank", "4", "--gpu-gib", "24"), 0, ["fits into 24 GiB"]),
        (("--gpu-gib", "0.001"), 1, ["does not fit"]),
        (VLLM, 0, ["vLLM fills 0.30 GiB", "0.62 GiB are left to training"]),
        ((*VLLM, "--vllm_gpu_memory_utilization", "0.0001"), 1,
         ["Larger: vllm_gpu_memory_utilization"]),
        ((*VLLM, "--cpu"), 2, ["gpu_gib: expected none with cpu; got 1.0"]),
        ((*VLLM[:2], "--cpu"), None, ["vLLM while training"]),
    ),
)  # fmt: skip
def test_the_command_says_whether_it_fits(flags, status, told, tmp_path, capsys):
    make_model("llama").config.save_pretrained(tmp_path)
    ended = None
    try:
        memory.main(["--model", str(tmp_path), *flags])
    except SystemExit as end:
        ended = end.code
    said = capsys.readouterr()
    assert ended == status and all(text in said.out + said.err for text in told)
