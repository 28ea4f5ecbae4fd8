"""Helpers that runs of TRL's trainer share."""

import functools
import random
import tempfile

import datasets
import pytest
import torch
import transformers
from trl import GRPOConfig

from tests.helpers.model_families import family_model, llava
from tests.helpers.tiny_models import make_tokenizer

STEPS = 3
TOLERANCE = 1e-5
CLOCK = ("runtime", "per_second", "time", "flos")
# Two updates of each batch, so that ratios are clipped; two micro-batches an update.
TWICE = {"num_iterations": 2, "gradient_accumulation_steps": 2}
FOUR = {"gradient_accumulation_steps": 4}
LENGTH = 16  # of the longest drawn completion


def noise(completions, **_):
    """Depends on the words alone, and seldom twice the same."""
    return [float(sum(map(ord, text)) % 17) for text in completions]


def arguments_of(folder, config=GRPOConfig, **options):
    return config(**{
        "output_dir": str(folder), "max_steps": STEPS, "use_cpu": True, "bf16": False,
        "report_to": "none", "per_device_train_batch_size": 4, "num_generations": 4,
        "max_completion_length": 6, "learning_rate": 0.05, "optim": "sgd", "logging_steps": 1,
        "lr_scheduler_type": "constant", "save_strategy": "no", "disable_tqdm": True,
        "gradient_checkpointing": False, "max_grad_norm": 1.0, "seed": 0, **options,
    })  # fmt: skip


def on_a_cpu(model, output):
    """Flags that leave of a recipe for `examples/trl_gsm8k.py` what a CPU can do in a second."""
    options = {
        "model_name_or_path": model, "output_dir": output, "dataset": "problems:gsm_symbolic",
        "chat": False, "use_vllm": False, "max_steps": 1, "num_generations": 2,
        "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2,
        "max_completion_length": 5, "entropy_coef": 0.1,  # as all rewards are 0
    }  # fmt: skip
    return [str(x) for name, value in options.items() for x in (f"--{name}", value)]


def prompts(count=24):
    return datasets.Dataset.from_list([{"prompt": f"{i} + {i % 5} ="} for i in range(count)])


def decided_model(family):
    """A model with favourite tokens, the end of a completion among them."""
    model = llava() if family == "llava" else family_model(family)
    with torch.no_grad():
        head = model.get_output_embeddings().weight
        head.mul_(3.0)
        head[0].mul_(8.0)
    return model


@functools.cache
def folder_of(family):
    """The folder of the stored model, from which TRL loads its reference."""
    folder = tempfile.mkdtemp()
    model = decided_model(family)
    # With it generate fails, in transformers; TRL asks for the routers' logits itself.
    if hasattr(model.config, "output_router_logits"):
        model.config.output_router_logits = False
    model.save_pretrained(folder)
    return folder


# Options of `trained` for the trainer, not for its configuration.
_TRAINER_OPTIONS = (
    "peft_config", "execution", "logits_dtype", "replay_support", "loss", "exact_kl",
    "skip_untrained", "sort_by_length", "zero_equal_groups",
)  # fmt: skip


def trained(
    trainer_class, folder, *, family="qwen2", stored=None, injected=None, scored=None,
    completions=None, rewards=noise, calls=None, evaluate=False, resume=None, **options,
):  # fmt: skip
    """The rows that a run logged, the losses unrounded, and the weights it ends with.

    The model is the one of the family, or that of the folder `stored`. `injected` adds to a
    micro-batch, `scored` to a generation batch; `completions` samples in the model's place;
    `calls` gets the shape of each batch that goes through the model while it trains; `resume` is
    a checkpoint.
    """
    kwargs = {k: options.pop(k) for k in _TRAINER_OPTIONS if k in options}
    losses = []

    class Watched(trainer_class):
        gradient_needs_advantage = True

        def _generate_single_turn(self, prompt_ids, *args, **kwargs):
            if completions is None:
                return super()._generate_single_turn(prompt_ids, *args, **kwargs)
            return completions(prompt_ids), None

        def _generate_and_score_completions(self, inputs):
            batch = super()._generate_and_score_completions(inputs)
            return batch | (scored(batch) if scored else {})

        def _compute_loss(self, model, inputs):
            use_vllm, inputs = self.use_vllm, inputs | (injected(inputs) if injected else {})
            self.use_vllm = use_vllm or "importance_sampling_ratio" in inputs
            try:
                loss = super()._compute_loss(model, inputs)
            finally:
                self.use_vllm = use_vllm
            losses.append(loss.item())
            return loss

    kind = transformers.AutoModelForCausalLM
    if family == "llava":
        kind = transformers.AutoModelForImageTextToText
    model = kind.from_pretrained(stored or folder_of(family), dtype=torch.float32)
    arguments = arguments_of(folder, **options)
    if evaluate:
        arguments.eval_strategy, arguments.eval_steps = "steps", 1
        kwargs["eval_dataset"] = prompts(4)
    torch.manual_seed(0)
    trainer = Watched(
        model, reward_funcs=rewards, args=arguments, train_dataset=prompts(),
        processing_class=make_tokenizer(), **kwargs,
    )  # fmt: skip
    if calls is not None:
        layers = trainer.model.get_input_embeddings()
        layers.register_forward_hook(
            lambda layer, args, _: calls.append(tuple(args[0].shape)) if layer.training else None
        )
    trainer.train(resume_from_checkpoint=resume)
    weights = {k: p.detach().clone() for k, p in trainer.model.named_parameters()}
    return losses, trainer.state.log_history, weights


def assert_same_training(actual, expected, tolerance=TOLERANCE):
    """Compares losses and weights."""
    (losses, _, weights), (expected_losses, _, expected_weights) = actual, expected
    assert len(losses) == len(expected_losses) >= STEPS
    torch.testing.assert_close(losses, expected_losses, rtol=tolerance, atol=TOLERANCE)
    for name, weight in expected_weights.items():
        close = {"rtol": 10 * tolerance, "atol": 1e-5}
        torch.testing.assert_close(weights[name], weight, msg=name, **close)


def assert_same_run(actual, expected):
    """Compares losses, weights and everything logged but times."""
    assert_same_training(actual, expected)
    (_, log, _), (_, expected_log, _) = actual, expected
    compared = 0
    for row, expected_row in zip(log, expected_log, strict=True):
        assert row.keys() == expected_row.keys()
        for name, value in expected_row.items():
            if any(word in name for word in CLOCK):
                continue
            if value is None or value != value:
                assert str(row[name]) == str(value), name
                continue
            error = abs(row[name] - value) / max(1.0, abs(value))
            # Sums of all gradients, which processors add up in other orders: 1.4e-5 was seen.
            tolerance = 5 * TOLERANCE if name == "grad_norm" else TOLERANCE
            assert error <= tolerance, (name, row[name], value)
            compared += 1
    assert compared > 10 * STEPS
    assert any(row.get("grad_norm", 0) > 1e-3 for row in log)


def completions_of(prompt_ids):
    """Completions of 1 to `LENGTH` tokens, by the prompt and its turn; a third of them end."""
    turns, done = {}, []
    for prompt in map(str, prompt_ids):
        turn = turns[prompt] = turns.get(prompt, -1) + 1
        draw = random.Random(f"{prompt} {turn}")
        ids = [draw.randrange(33, 90) for _ in range(draw.randrange(1, LENGTH + 1))]
        done.append([*ids[:-1], 0] if turn % 3 else ids)
    return done


def rewards_of(share, equal=1.0):
    """Equal rewards for `share` of the prompts; of others' two are the mean of the group."""

    def reward(prompts, **_):
        turns, rewards = {}, []
        for prompt in prompts:
            turn = turns[prompt] = turns.get(prompt, -1) + 1
            same = random.Random(f"of {prompt}").random() < share
            rewards.append(equal if same else (0.0, 1.0, 2.0, 1.0)[turn % 4])
        return rewards

    return reward


def run(trainer_class, folder, share=0.5, **options):
    """A run with drawn completions, whose rewards are equal in a `share` of the groups."""
    return trained(trainer_class, folder, **{
        "completions": completions_of, "rewards": rewards_of(share), "num_generations": 4,
        "per_device_train_batch_size": 6 if options.get("gradient_accumulation_steps") == 4 else 4,
        "max_completion_length": LENGTH, **options,
    })  # fmt: skip


def steps_of(log, name):
    return [row[name] for row in log if "loss" in row and name in row]


# Of these TRL logs means over tokens of micro-batches, which are others if some are moved.
_OF_TOKENS = ("entropy", "clip_ratio", "cispo_clip_ratio", "kl", "vespo")


def assert_same_updates(actual, expected, tolerance=1e-6):
    """Compares weights, and all that TRL logs but times and means over tokens."""
    for row, expected_row in zip(actual[1], expected[1], strict=True):
        for name, value in expected_row.items():
            if not name.startswith(_OF_TOKENS) and not any(word in name for word in CLOCK):
                close = {"rel": 20 * tolerance, "abs": tolerance, "nan_ok": True}
                assert row[name] == pytest.approx(value, **close), name
    assert max(steps_of(expected[1], "grad_norm")) > 0.01
    for name, weight in expected[2].items():
        torch.testing.assert_close(actual[2][name], weight, msg=name, rtol=0, atol=tolerance)
