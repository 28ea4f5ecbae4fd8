"""Updates of TRL's trainer: its own, with our head, sorted by length, and without untrained ones.

    python -m benchmarks.trl_updates [--model tiny] [--equal 0 30 50 90] [--beta 0.04] [--rounds 3]

A step has ten groups in five micro-batches. Completions and rewards are fixed; nothing is sampled.
Contenders share weights, which stand still, and take turns. An update is `training_step` less
TRL's generation and rewards. Time is that of the CPU, on one thread, so that other work on the
machine hardly counts. A row has no ratio unless its gradient norm is TRL's.
"""

from __future__ import annotations

import contextlib
import ctypes
import io
import random
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import datasets
import torch
import transformers
from trl import GRPOConfig, GRPOTrainer

from benchmarks.measure import PeakMemory, new_result, parser_of, spread, write_json
from examples.demo_model import MODEL, model_path
from grpo_kernels.integrations.trl import FusedGRPOTrainer

GROUPS, MICRO_BATCHES = 10, 5
TRL, OURS = "TRL", "our head"
CONTENDERS: dict[str, dict[str, bool]] = {
    TRL: {}, OURS: {}, "sorted": {"sort_by_length": True}, "skipped": {"skip_untrained": True}
}  # fmt: skip
# model: completions of a group, tokens of the longest one, words of a prompt
SIZES = {"tiny": (4, 64, 8), "smollm2": (2, 48, 8)}


@dataclass
class Clock:
    """Seconds of a contender's step, and the size of its calls of the model."""

    step: float = 0.0
    sampling: float = 0.0
    calls: list[int] = field(default_factory=list)  # tokens, padding included

    @contextmanager
    def adds_to(self, name: str) -> Iterator[None]:
        start = time.process_time()
        yield
        setattr(self, name, getattr(self, name) + time.process_time() - start)


class Rewards:
    """Rewards of which a share of the groups, drawn once, has equal ones."""

    __name__ = "rewards"

    def __init__(self, size: int) -> None:
        self.size, self.equal = size, 0.0

    def __call__(self, prompts: list[str], **_: Any) -> list[float]:
        equal = set(random.Random(3).sample(range(GROUPS), round(self.equal * GROUPS)))
        size = self.size
        return [1.0 if i // size in equal else float(i % size) for i in range(len(prompts))]


def timed(trainer_class: Any, clock: Clock, longest: int) -> Any:
    """A class of trainers that samples fixed completions and notes times and shapes."""

    class Timed(trainer_class):
        gradient_needs_advantage = True

        def _generate_single_turn(self, prompt_ids: Any, *_: Any, **__: Any) -> Any:
            draw, vocabulary = random.Random(1), self.model.config.vocab_size
            lengths = [draw.randrange(longest // 8, longest + 1) for _ in prompt_ids]
            return [[draw.randrange(33, vocabulary) for _ in range(n)] for n in lengths], None

        def _generate_and_score_completions(self, inputs: Any) -> Any:
            with clock.adds_to("sampling"):
                return super()._generate_and_score_completions(inputs)

        def training_step(self, *args: Any, **kwargs: Any) -> Any:
            with clock.adds_to("step"):
                return super().training_step(*args, **kwargs)

    return Timed


def trainers_of(name: str, beta: float, rewards: Rewards) -> dict[str, tuple[Any, Clock]]:
    if name == "tiny":
        from tests.helpers.tiny_models import make_tokenizer
        from tests.helpers.trl_runs import folder_of

        folder, tokenizer = folder_of("qwen2"), make_tokenizer()
    else:
        folder = str(model_path())
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder)

    def model() -> Any:
        return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)

    first, trainers = model(), dict[str, tuple[Any, Clock]]()
    size, longest, words = SIZES[name]
    data = [{"prompt": " ".join(map(str, range(i, i + words)))} for i in range(GROUPS)]
    for contender, options in CONTENDERS.items():
        if beta and "skip_untrained" in options:
            continue
        policy, clock = model(), Clock()
        policy.load_state_dict(first.state_dict(keep_vars=True), assign=True)
        policy.tie_weights()
        args = GRPOConfig(
            tempfile.mkdtemp(), max_steps=1, use_cpu=True, bf16=False, report_to="none",
            per_device_train_batch_size=GROUPS * size // MICRO_BATCHES, beta=beta,
            gradient_accumulation_steps=MICRO_BATCHES, num_generations=size, learning_rate=0.0,
            max_completion_length=longest, optim="sgd", logging_steps=1, save_strategy="no",
            disable_tqdm=True, gradient_checkpointing=False, seed=0,
        )  # fmt: skip
        cls = timed(GRPOTrainer if contender == TRL else FusedGRPOTrainer, clock, longest)
        trainer = cls(
            policy, rewards, args, datasets.Dataset.from_list(data), processing_class=tokenizer,
            **options,
        )  # fmt: skip
        trainer.model.get_input_embeddings().register_forward_hook(
            partial(lambda clock, _, args, __: clock.calls.append(args[0].numel()), clock)
        )
        trainers[contender] = trainer, clock
    return trainers


def step(trainer: Any, clock: Clock) -> dict[str, Any]:
    clock.step = clock.sampling = 0.0
    clock.calls.clear()
    if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):
        trim(0)  # returns freed memory to the system
    with PeakMemory(torch.device("cpu")) as memory, contextlib.redirect_stdout(io.StringIO()):
        trainer.train()
    log = [row for row in trainer.state.log_history if "grad_norm" in row]
    return {
        "seconds": clock.step - clock.sampling, "peak_bytes": memory.extra_bytes,
        "grad_norm": log[-1]["grad_norm"],
        "tokens": sum(clock.calls),
    }  # fmt: skip


def main() -> None:
    parser = parser_of("benchmarks.trl_updates", __doc__, rounds=3)
    parser.add_argument("--model", choices=SIZES, default="smollm2", help=f"smollm2: {MODEL}")
    parser.add_argument(
        "--equal", type=int, nargs="+", default=[0, 30, 50, 90],
        help="percent of the groups with equal rewards (default: 0 30 50 90)",
    )  # fmt: skip
    parser.add_argument("--beta", type=float, default=0.0, help="weight of the KL (default: 0)")
    args = parser.parse_args()
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    result = new_result("cpu", model=args.model, beta=args.beta)
    rewards = Rewards(SIZES[args.model][0])
    trainers = trainers_of(args.model, args.beta, rewards)
    print("\nequal groups  contender   CPU seconds [p20, p80]      x TRL   peak MiB")
    for percent in args.equal:
        rewards.equal = percent / 100
        rows: dict[str, list[dict[str, Any]]] = {name: [] for name in trainers}
        for number in range(args.rounds + 1):  # the first is not counted
            order = list(trainers.items())
            for name, (trainer, clock) in order if number % 2 else reversed(order):
                row = step(trainer, clock)
                rows[name] += [row] if number else []
        norm, theirs = rows[TRL][0]["grad_norm"], spread([x["seconds"] for x in rows[TRL]])[0]
        for name, steps in rows.items():
            right = all(abs(x["grad_norm"] - norm) <= 1e-4 * norm for x in steps)
            median, low, high = spread([x["seconds"] for x in steps])
            ratio = f"{median / theirs:.2f}" if right else "WRONG"
            peak = spread([x["peak_bytes"] or 0 for x in steps])[0] / 2**20
            print(
                f"{percent:10} %  {name:10} {median:8.3f} [{low:.3f}, {high:.3f}] {ratio:>12} "
                f"{peak:10.0f}", flush=True,
            )  # fmt: skip
            result["rows"].append({"equal": percent, "contender": name, "steps": steps})
    write_json(args.json, result)


if __name__ == "__main__":
    main()
