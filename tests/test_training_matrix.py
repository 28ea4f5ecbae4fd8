"""Every option of a run beside every setting: equal to the plain loop, or refused by name.

A run of each option alone, or of what it needs: on a tiny model with all weights, on completions
with tokens that the policy did not sample, with LoRA and the trainer's own sampler, and with a
stand-in for vLLM; `tests/ranks` has two processes. Every run is cut into micro-batches. Weights and
metrics are those of `tests/helpers/plain_loop.py`, which knows nothing of options that change
memory, looks or files.
"""

import json
import math
from dataclasses import fields

import pytest

from grpo_kernels import GRPOLossConfig
from grpo_kernels.explain.records import read_rows
from grpo_kernels.loss.config import AGGREGATIONS
from grpo_kernels.training import TrainingConfig
from grpo_kernels.training.sampling.rollout import RolloutError
from tests.helpers.matrix_runs import SETTINGS, Run, compare, save_models

pytestmark = pytest.mark.usefixtures("real_memory")

OTHER = "(the folder of another model)"
KL = {"beta": 0.1}
# Stop strings, with which some completions of the stand-in end.
LETTERS = [chr(i) for i in range(33, 127)]
HELD_OUT = {"eval_size": 2}
# Values of each option, each with what the option needs. The plain loop honors those of the second
# group; those of the first must change nothing that is trained.
SAMPLES = {
    "model": [{"model": OTHER}],
    "dataset": [
        {"dataset": "other/sums"},
        {"dataset": "examples.problems:additions", "system_prompt": "", "max_prompt_length": 99},
    ],
    "dataset_config": [{"dataset_config": "large"}],
    "train_size": [{"train_size": 5}],
    "eval_size": [HELD_OUT],
    "eval_max_completion_length": [HELD_OUT | {"eval_max_completion_length": 3}],
    "eval_temperature": [HELD_OUT | {"eval_temperature": 0.5}],
    "chat": [{"chat": True}],
    "system_prompt": [{"system_prompt": "Add."}],
    "max_prompt_length": [{"max_prompt_length": 61}],
    "dtype": [{"dtype": "fp32"}, {"dtype": "bf16"}],
    "gradient_checkpointing": [{"gradient_checkpointing": True}],
    "micro_batch_size": [{"micro_batch_size": 1}, {"micro_batch_size": 12}],
    "share_prompts": [{"share_prompts": False}],
    "skip_untrained": [{"skip_untrained": False}],
    "output": [{}],
    "eval_every": [HELD_OUT | {"eval_every": 1, "steps": 2}],
    "explain_every": [{"explain_every": 1}],
    "show_every": [{"show_every": 1, "steps": 2}],
    "save_every": [{"save_every": 1, "steps": 2}],
    "save_model": [{"save_model": True}],
    "resume": [{"resume": True, "save_every": 1, "steps": 2}],
    "trackers": [{"trackers": []}],
    "vllm_gpu_memory_utilization": [{"vllm_gpu_memory_utilization": 0.5}],
    "vllm_enable_sleep_mode": [{"vllm_enable_sleep_mode": True}],
    "stop": [{"stop": ["zz"]}],
    "max_completion_length": [{"max_completion_length": 3}],
    "rollout": [{}],
    "seed": [{"seed": 3}],
}
TRAINS = {
    "lora_rank": [{"lora_rank": 3}],
    "lora_alpha": [{"lora_rank": 2, "lora_alpha": 7}],
    "lora_target": [
        {"lora_rank": 2, "lora_target": r".*\.(q|down)_proj"},
        {"lora_rank": 2, "lora_target": r".*\.q_proj|lm_head"} | KL,
    ],
    "rewards": [{"rewards": ["noise", "length"]}],
    "reward_weights": [{"rewards": ["noise", "length"], "reward_weights": [1.0, -2.0]}],
    "steps": [{"steps": 2}],
    "prompts_per_step": [{"prompts_per_step": 2}],
    "num_generations": [{"num_generations": 4}],
    "temperature": [{"temperature": 0.7}],
    "top_k": [{"top_k": 20}, {"top_k": 20, "kl_estimator": "exact", "replay_support": False} | KL],
    "top_p": [{"top_p": 0.9}],
    "min_p": [{"min_p": 0.5}],
    "replay_support": [{"top_k": 20, "replay_support": False}],
    "mask_truncated_completions": [{"mask_truncated_completions": True, "stop": LETTERS}],
    "loss_type": [
        {"loss_type": name} for name in (*AGGREGATIONS, "gspo", "reinforce") if name != "dapo"
    ],
    "loss_options": [{"loss_type": "sapo", "loss_options": {"temperature_neg": 2.0}}],
    "ref_model": [KL | {"ref_model": OTHER}],
    "sync_ref_every": [
        KL | {"sync_ref_every": 1, "steps": 2},
        KL | {"sync_ref_every": 1, "steps": 3, "resume": True, "save_every": 1},
    ],
    "scale_rewards": [{"scale_rewards": "batch"}, {"scale_rewards": "none"}],
    "epochs_per_rollout": [{"epochs_per_rollout": 3}],
    "minibatches": [{"minibatches": 2}],
    "learning_rate": [{"learning_rate": 1e-3}],
    "weight_decay": [{"weight_decay": 5.0}],
    "schedule": [
        {"schedule": "linear"},
        {"schedule": "cosine", "epochs_per_rollout": 3},
        {"schedule": "linear", "warmup_steps": 1, "epochs_per_rollout": 4},
    ],
    "warmup_steps": [{"warmup_steps": 1}],
    "max_grad_norm": [{"max_grad_norm": 0.5}],
    "beta": [{"beta": 1.0}],
    "epsilon": [{"epsilon": 0.05}],
    "epsilon_high": [{"epsilon_high": 0.02}],
    "delta": [{"delta": 1.1}],
    "dual_clip": [{"dual_clip": 1.1}],
    "importance_sampling_level": [{"importance_sampling_level": "sequence"}],
    "aggregation": [{"loss_type": "gspo", "aggregation": "luspo"}],
    "kl_estimator": [
        KL | {"kl_estimator": "k1"},
        KL | {"kl_estimator": "exact"},
        KL | {"kl_estimator": "exact", "ref_model": OTHER},
    ],
    "kl_clamp": [KL | {"kl_clamp": 0.001}],
    "use_bias_correction_kl": [KL | {"use_bias_correction_kl": False}],
    "entropy_coef": [{"entropy_coef": 0.1}],
    "top_entropy_quantile": [{"top_entropy_quantile": 0.4}],
    "entropy_threshold": [{"top_entropy_quantile": 0.4, "entropy_threshold": 5.39}],
    "is_correction": [{"is_correction": "token_truncate", "is_clip_max": 0.9}],
    "is_gate": [{"is_correction": "token_mask", "is_gate": "tv", "is_clip_max": 0.1}],
    "is_clip_max": [{"is_correction": "sequence_truncate", "is_clip_max": 0.5}],
    "is_clip_min": [{"is_correction": "token_mask", "is_clip_min": 0.99}],
    "off_policy_threshold": [{"off_policy_threshold": 0.01}],
    "sapo_temperature_pos": [{"loss_type": "sapo", "sapo_temperature_pos": 2.0}],
    "sapo_temperature_neg": [{"loss_type": "sapo", "sapo_temperature_neg": 2.0}],
    "vespo_k_pos": [{"loss_type": "vespo", "vespo_k_pos": 1.0}],
    "vespo_lambda_pos": [{"loss_type": "vespo", "vespo_lambda_pos": 1.0}],
    "vespo_k_neg": [{"loss_type": "vespo", "vespo_k_neg": 1.0}],
    "vespo_lambda_neg": [{"loss_type": "vespo", "vespo_lambda_neg": 1.0}],
    "dppo_ratio_max": [{"loss_type": "dppo_tv", "dppo_ratio_max": 1.01}],
}
TABLE = SAMPLES | TRAINS
TOLERANCE = {"dtype-1": 0.2}  # weights and GEMMs in bf16


def test_every_option_has_a_value():
    assert TABLE.keys() == {x.name for x in fields(TrainingConfig)}
    for name, values in TABLE.items():
        assert (values and all(name in one for one in values)) or values == [{}], name


# Options that are refused, by setting: by their name.
NO_LOGPS = dict.fromkeys(("is_correction", "is_gate", "is_clip_max", "is_clip_min"), "is_corr")
NO_VLLM = {x: x for x in ("vllm_gpu_memory_utilization", "vllm_enable_sleep_mode")}
REFUSED = {
    "plain": NO_LOGPS | NO_VLLM,
    "turns": NO_VLLM,
    "lora": NO_LOGPS | NO_VLLM | {"sync_ref_every": "sync_ref_every=1 does not work with lora"},
    "vllm": NO_VLLM | {"lora_target-1": "no adapter on a tied output layer"},
}


def cases():
    """The options of each run, by its name."""
    return {
        f"{name}-{i}" if i else name: one
        for name, values in TABLE.items()
        for i, one in enumerate(values)
    }


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return save_models(tmp_path_factory)


# Numbers that the loss alone gets, whose values other tests compare; one of them is enough here.
OF_THE_LOSS = {x.name for x in fields(GRPOLossConfig)} - {
    "loss_type", "loss_options", "scale_rewards", "beta", "epsilon", "kl_estimator",
    "top_entropy_quantile", "entropy_coef", "max_completion_length", *NO_LOGPS,
}  # fmt: skip
# The settings of the fast tests: one for each option, which it meets, and no other; of the loss
# types the first alone.
MEETS = {
    "turns": {
        "loss_type", "aggregation", "minibatches", "skip_untrained", "micro_batch_size",
        "mask_truncated_completions", "entropy_coef", "off_policy_threshold", "share_prompts",
        "kl_estimator", "top_k",
    },
    "lora": {
        "lora_alpha", "lora_target", "gradient_checkpointing", "share_prompts", "kl_estimator",
        "ref_model", "weight_decay", "save_model", "resume", "temperature", "top_k", "top_p",
        "min_p",
    },
    "vllm": {
        "rollout", "stop", "max_completion_length", "eval_size", "lora_rank", "chat", *NO_VLLM,
        *NO_LOGPS,
    },
}  # fmt: skip
MEETS["plain"] = TABLE.keys() - OF_THE_LOSS - MEETS["turns"] - MEETS["lora"] - MEETS["vllm"]


@pytest.mark.parametrize(("case", "setting"), [
    pytest.param(
        case, setting,
        marks=[pytest.mark.slow] * (
            case.partition("-")[0] not in MEETS[setting] or case.startswith("loss_type-")
        ),
    )
    for case in cases() for setting in SETTINGS
])  # fmt: skip
def test_an_option_is_honored_or_refused(case, setting, models, tmp_path):
    name, one = case.partition("-")[0], cases()[case]
    model, other = map(str, models)
    options = {k: other if x == OTHER else x for k, x in (SETTINGS[setting] | one).items()}
    message = REFUSED[setting].get(case, REFUSED[setting].get(name))
    if message is not None:
        with pytest.raises((ValueError, RolloutError), match=message):
            Run(model, tmp_path, options, setting)
        return
    run = Run(model, tmp_path, options, setting)
    compare(run.weights, run.rows, run.options, run.steps, tolerance=TOLERANCE.get(case, 1e-3))
    asserted(name, run)


SAMPLING = {"temperature": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p",
            "max_completion_length": "max_new_tokens"}  # fmt: skip


def asserted(name, run):
    """Checks what options do beside training."""
    options, folder, asked = run.options, run.folder, run.watched.asked
    training = [s for n, s in asked if n == options["num_generations"]]
    assert len(training) == options["steps"]
    for option, field in SAMPLING.items():
        assert all(getattr(s, field) == options[option] for s in training), option
    assert all(s.stop == tuple(options["stop"]) for s in training)
    truncates = options["top_k"] or options["top_p"] < 1 or options["min_p"]
    assert training[0].record_support == bool(truncates and options["replay_support"])
    evaluations = [s for n, s in asked if n == 1]
    held_out = (folder / "evaluations.jsonl").read_text().splitlines() if evaluations else []
    assert len(evaluations) == len(held_out) == bool(options["eval_size"]) * (
        3 if options["eval_every"] else 2
    )  # fmt: skip
    for sampling in evaluations:
        assert sampling.temperature == options["eval_temperature"]
        longest = options["eval_max_completion_length"] or options["max_completion_length"]
        assert sampling.max_new_tokens == longest and not sampling.record_support
    assert (folder / "model").exists() == options["save_model"]
    adapters = (folder / "model" / "adapter_model.safetensors").exists()
    assert adapters == bool(options["save_model"] and options["lora_rank"])
    assert bool(run.layers) == options["gradient_checkpointing"]
    assert any((folder / "checkpoints").glob("step-*")) == (options["save_every"] > 0)
    assert len([*folder.glob("explanations/*.html")]) == (
        options["steps"] if options["explain_every"] else 0
    )
    shown = {row["step"] for row in read_rows(folder / "samples.jsonl")}
    assert shown == {x for x in range(1, options["steps"] + 1)
                     if x == 1 or x % options["show_every"] == 0}  # fmt: skip
    assert len(run.trainer.held_out) == options["eval_size"]
    problems = run.trainer.train_problems
    assert all(options["system_prompt"] in str(x["prompt"]) for x in problems)
    if ":" not in options["dataset"]:
        assert len(problems) == min(20, options["train_size"])
        assert set(run.loaded) == {(options["dataset"], options["dataset_config"] or None)}
    written = json.loads((folder / "config.json").read_text())
    assert written[name] == json.loads(json.dumps(options[name])) or math.nan is written[name]
