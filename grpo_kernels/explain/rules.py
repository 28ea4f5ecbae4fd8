"""Rules for the numbers of a run: one table, and functions that apply it.

`docs/normal.md`, the trainer's warnings and the answers of `python -m grpo_kernels.explain LOG`
come from this table.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from . import signs
from .signs import FAST, WINDOW, Log, Row


class Rule(NamedTuple):
    """A row of the table, whose texts are sentences without their full stop."""

    name: str  # in the trainer's logs
    verdict: str  # "normal", "look" or "stop"
    live: int  # number of last steps by which the trainer warns during a run; 0: never
    find: Callable[[Log], str]  # returns the numbers of a log that show it, in words, or ""
    source: str  # threads and papers
    sign: str  # the sign in the log
    why: str
    remedy: str = ""  # our options, then others'


class Finding(NamedTuple):
    """A rule, and the numbers that show it."""

    rule: Rule
    evidence: str

    def __str__(self) -> str:
        return " ".join(f"{x}." for x in (self.evidence, self.rule.why, self.rule.remedy) if x)


QUESTIONS: dict[str, tuple[Rule, ...]] = {
    "Loss is 0, negative or rising?": (
        Rule("loss_zero", "normal", 0, signs.loss_zero, "TRL #2703, #3452; open-r1 #239",
             "Loss is 0 or close to it, the gradient is not",
             "The ratio is 1 and a group's advantages add up to 0, so the loss cancels to 0; the "
             "tokens' gradients do not", "Watch the reward"),
        Rule("loss_negative", "normal", 0, signs.loss_negative, "simple_GRPO #30, open-r1 #704",
             "Loss is negative, or changes sign",
             "With unequal lengths or several updates the policy term has either sign"),
        Rule("loss_is_kl", "normal", 0, signs.loss_is_kl, "TRL #2703, open-r1 #239",
             "Loss rises, and equals `beta` times the KL",
             "The policy term is 0, and the KL grows"),
    ),
    "KL is absent, NaN, 0 or negative?": (
        Rule("kl_absent", "normal", 0, signs.kl_absent, "TRL #4040",
             "No KL, or NaN in all rows", "Without beta there is no reference",
             "Set beta > 0 (verl: use_kl_loss) if you want one"),
        Rule("kl_zero", "look", 0, signs.kl_zero, "ms-swift #5571, theLMbook #8",
             f"KL is still 0 after {WINDOW} steps",
             "The weights do not move, or the reference moves with them; some trainers log 0 "
             "without beta", "Check beta, grad_norm and learning_rate"),
        Rule("kl_negative", "normal", 0, signs.kl_negative, "TRL #3240, verl #7412",
             "KL is below 0, but on average above -0.1",
             "The estimate k1 has either sign; so has verl's actor/ppo_kl"),
        Rule("kl_below", "look", 0, partial(signs.kl_negative, usual=False), "LlamaFactory #1833",
             "KL is mostly below -0.1",
             "A true KL is not negative: these samples are not from the policy that is scored",
             "Compare temperature, top_p and weights of both"),
    ),
    "KL above 10, or in the billions?": (
        Rule("kl_large", "look", 1, signs.kl_large, "torchforge #664, TRL #3015",
             "Mean KL, or that of a token (`kl_max`), is above 10",
             "k3 grows exponentially with the distance, so one token can be all of it",
             "Set kl_clamp (verl clamps at 10) or kl_estimator k2, or lower learning_rate"),
    ),
    "Entropy falls?": (
        Rule("entropy_learns", "normal", 0, partial(signs.entropy_falls, learns=True),
             "make demo", f"Entropy halves within {FAST} steps, reward rises",
             "The policy becomes sure of what earns reward, such as a format"),
        Rule("entropy_falls", "look", 0, partial(signs.entropy_falls, learns=False),
             "verl #5953, TRL #5584", f"Entropy halves within {FAST} steps, reward does not rise",
             "Variety is lost, and nothing gained",
             "Raise epsilon_high or entropy_coef (verl: clip_ratio_high, entropy_coeff), or lower "
             "learning_rate"),
        Rule("entropy_low", "stop", WINDOW, signs.entropy_low, "TRL #6140",
             "Entropy is below 0.05, and below a fifth of its first value",
             "Entropy collapses: completions of a group become alike, and so do their rewards",
             "Lower learning_rate, raise temperature, epsilon_high or entropy_coef"),
    ),
    "Clip ratio 0?": (
        Rule("clip_zero", "normal", 0, signs.clip_zero, "TRL #3120, #3757",
             "Clip ratios are always 0",
             "With one update per rollout the ratio is 1 when the loss is computed",
             "Ratios are clipped from the second update on: epochs_per_rollout, minibatches (TRL: "
             "num_iterations; verl: ppo_epochs)"),
        Rule("ratio_large", "look", 1, lambda log: log.top(10.0, "ratio_max"), "arXiv 1912.09729",
             "A ratio is above 10",
             "PPO's clip does not bound a large ratio whose advantage is negative",
             "Set delta (verl: clip_ratio_c), or lower learning_rate"),
    ),
    "All rewards equal?": (
        Rule("groups_equal", "stop", WINDOW, lambda log: signs.stretch(log, "groups_equal", 1.0),
             "TRL #3857, ms-swift #4570",
             f"`groups_equal` (TRL: `frac_reward_zero_std`) is 1 at {WINDOW} steps in a row",
             "A group with equal rewards teaches nothing; rewards/NAME/std is over the "
             "batch, and does not show it",
             "Take other prompts, finer rewards, more num_generations, a higher temperature"),
    ),
    "Grad norm 0, NaN or a spike?": (
        Rule("gradient", "stop", 1, signs.bad_gradient, "unsloth #3006, ms-swift #3136",
             "Loss or grad norm is NaN or infinite",
             "grpo_kernels skips the update, as float16's loss scaling does in first steps; other "
             "trainers may make the weights NaN",
             "Lower learning_rate, and look for NaN in the model"),
        Rule("loss_scale", "normal", 1, signs.scaled, "arXiv 1710.03740",
             "Gradients too large for float16 in first steps",
             "The update is skipped, and the scale of the loss halved"),
        Rule("grad_zero", "stop", 0, signs.grad_zero, "ms-swift #5571, EchoInk #4",
             "Grad norm is 0, though rewards differ",
             "No trained weight has a gradient",
             "Check requires_grad, LoRA's targets and DeepSpeed's version"),
        Rule("grad_spike", "look", 0, signs.spikes, "TRL #2980, ms-swift #3713",
             "Grad norm exceeds all of the last 100 steps, and five times their median",
             "The norm is logged before clipping, so one spike does little harm",
             "Set max_grad_norm; a step's page names the tokens"),
    ),
    "Reward up, accuracy down?": (
        Rule("reward_hacking", "look", 0, signs.hacking, "open-r1 #255, autocontext #1076",
             "Reward rises, accuracy falls",
             "The reward pays for something else, such as a format, or prompts are memorised",
             "Read completions, weigh the answer more (reward_weights), raise beta"),
    ),
    "Completions cut?": (
        Rule("truncated", "stop", WINDOW, signs.truncated, "TRL #5759, autocontext #1067",
             f"95 % of the completions are cut, at {WINDOW} steps in a row",
             "They end before their answer, so rewards tell little",
             "Raise max_completion_length (verl: max_response_length), or set a stop string"),
    ),
    "Sampler and trainer apart?": (
        Rule("gap_rounding", "normal", 0, partial(signs.gap, kind="rounding"),
             "TRL #4772, Fast-LLM #525",
             "The gap, the mean difference of the two's log-probs, is constant, below 0.1 nats",
             "Kernels and bf16 round differently, by 0.01 to 0.04 nats",
             "is_correction bounds the effect (TRL: vllm_importance_sampling_correction; verl: "
             "rollout_is)"),
        Rule("gap_product", "look", 0, partial(signs.gap, kind="product"), "TRL #5814",
             "The gap is below 0.1 nats, the mean importance ratio 0.9 or less",
             "Small gaps of tokens multiply over a sequence, whose ratio is capped or masked",
             "Set is_correction token_truncate (TRL: vllm_importance_sampling_mode)"),
        Rule("gap_temperature", "look", 0, partial(signs.gap, kind="temperature"),
             "TRL #4159, #6789",
             "The gap is 0.1 to 1 nats from the first step, or 0.02 with a ratio of 0.9 to 0.97",
             "The loss leaves out the sampler's temperature, top-p, top-k or min-p",
             "Keep replay_support on, use one temperature"),
        Rule("gap_weights", "stop", 0, partial(signs.gap, kind="weights"), "ms-swift #9855",
             "The gap is small at first, grows fourfold and passes 0.1 nats",
             "The sampler has old weights, or a base model without its LoRA",
             "Check that weights reach the sampler after each step"),
        Rule("gap_tokens", "stop", 0, partial(signs.gap, kind="tokens"), "TRL #5224, rllm #272",
             "The gap is above 1 nat from the first step, or a token of most steps is off by 10",
             "Tokens differ: targets shifted by one, text encoded again, other special tokens",
             "Pass the sampler's ids, not its text"),
    ),
    "Nothing moves at a small learning rate?": (
        Rule("bf16_weights", "look", 0, signs.rounded_away, "AReaL #1634, pytorch/ao #1124",
             "Weights in bf16 without an fp32 copy, learning rate below 1/512 of a weight",
             "In bf16 a change below 1/512 to 1/256 of a weight is lost; DeepSpeed's optimizer "
             "has fp32 copies",
             "Set dtype mixed (fp32 weights, bf16 GEMMs), lora_rank, or a larger learning_rate"),
    ),
    "Other warnings of our trainer": (
        Rule("answers_late", "look", 1, lambda log: log.top(0.0, "answers_timed_out"),
             "docs/training.md", "`answers_timed_out` is above 0",
             "These comparisons took too long and count as wrong",
             "Look at samples.jsonl for long or nested expressions"),
        Rule("support_missing", "look", 1, signs.no_support, "docs/support.md",
             "`support/mean` is absent with top_k, top_p or min_p",
             "The loss uses the full softmax, and scores another policy than the one that sampled",
             "Let your rollout return Completion.support, or turn replay_support off"),
    ),
}  # fmt: skip
RULES = {rule.name: rule for rules in QUESTIONS.values() for rule in rules}
VERDICTS = {"stop": "stop", "look": "look at this", "normal": "normal"}
_INTRODUCTION = """\
# Is this number normal?

You do not trust a number in a log of GRPO. Look for it below, or let the command look at the log:

```
python -m grpo_kernels.explain output/     # TRL's folder; or a file with the lines it printed
python -m grpo_kernels.explain wandb.csv   # charts of one run; also verl's console, JSONL
python -m grpo_kernels.explain runs/a      # a run of this library
python -m grpo_kernels.explain step_12/    # tokens: TRL's parquet, prime-rl's exports
```

`normal`: go on. `look`: find out why. `stop`: the run learns nothing, or breaks.
"""


def verdicts(
    rows: Sequence[Row], options: Mapping[str, Any] = {}, names: Mapping[str, str] = {}
) -> list[Finding]:
    """Returns the findings in a log, the most urgent first.

    `rows` have our names of metrics; `names` are the log's, for the texts. `options`: the run's
    known options.
    """
    first = next((row for row in rows if row.get("entropy") is not None), {})
    log, findings = Log(rows, options, first), []
    for rule in RULES.values():
        if saw := rule.find(log):
            saw = re.sub(r"[\w/]+", lambda word: names.get(word[0], word[0]), saw)
            findings.append(Finding(rule, saw))
    return sorted(findings, key=lambda x: [*VERDICTS].index(x.rule.verdict))


class Watch:
    """The trainer's warnings, step by step; each is repeated after `FAST` steps at the earliest."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        self.options = options
        self.first: Row = {}  # the first row with an entropy
        self.rows: deque[Row] = deque(maxlen=WINDOW)
        self.last_steps: dict[str, int] = {}  # by rule

    def after_step(self, row: Row) -> list[dict[str, str]]:
        """Returns names and texts of the rules that the last steps show; call it for each step."""
        self.rows.append(row)
        if self.first.get("entropy") is None:
            self.first = row
        warnings = []
        for rule in RULES.values():
            last = self.last_steps.get(rule.name, -FAST)
            quiet = row["step"] - last < FAST and rule.name != "gradient"
            if quiet or not 0 < rule.live <= len(self.rows):
                continue
            if saw := rule.find(Log([*self.rows][-rule.live :], self.options, self.first)):
                self.last_steps[rule.name] = row["step"]
                warnings.append({"rule": rule.name, "text": str(Finding(rule, saw))})
        return warnings


def markdown() -> str:
    """Returns `docs/normal.md`."""
    lines = [_INTRODUCTION, "| question | verdict |", "|---|---|"]
    for question, rules in QUESTIONS.items():
        kept = "".join(x for x in question.lower() if x.isalnum() or x in " -")
        shown = ", ".join(x for x in VERDICTS if x in {rule.verdict for rule in rules})
        lines.append(f"| [{question}](#{kept.replace(' ', '-')}) | {shown} |")
    for question, rules in QUESTIONS.items():
        lines += ["", f"## {question}"]
        for rule in rules:
            more = "".join(f" {x}." for x in (rule.why, rule.remedy) if x)
            text = f"**{rule.sign}: {rule.verdict}.**{more}"
            text = re.sub(r"(?<![`\w/])([\w/]+_[\w/]+|rewards/\S+)", r"`\1`", text)
            lines += ["", f"{text} ({rule.source})"]
    return "\n".join(lines) + "\n"
