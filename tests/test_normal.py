"""Rules that tell whether a number is normal, on what public threads quote and on planted signs."""

import json
import math
import random
import shutil
from pathlib import Path

import pytest

from grpo_kernels.explain import __main__ as command
from grpo_kernels.explain import exports, logs, rules
from grpo_kernels.explain.rules import RULES, VERDICTS, WINDOW, Watch, verdicts

ROOT = Path(__file__).parent.parent
BF16 = {"dtype": "bf16", "learning_rate": 1e-6}
RATIO, CLIPPED = "sampling/importance_sampling_ratio/mean", "clip_ratio/region_mean"
GAP = "sampling/sampling_logp_difference/mean"


def log(options=None, *, step=(), **columns):
    """Rows of steps from lists of values, and options; a number is that of each step."""
    count = max((len(x) for x in columns.values() if isinstance(x, list)), default=8)
    full = {"RATIO": RATIO, "CLIPPED": CLIPPED}
    lists = {full.get(k, k): x if isinstance(x, list) else [x] * count for k, x in columns.items()}
    steps = step or range(1, count + 1)
    rows = [{"step": steps[i], **{k: x[i] for k, x in lists.items()}} for i in range(count)]
    return rows, options or {}


def falling(start, end, count=30, at=10):
    """Constant, then within ten steps another constant."""
    slope = [start + (end - start) * min(1, max(0, (i - at) / 10)) for i in range(count)]
    return [x * (1 + 0.02 * (-1) ** i) for i, x in enumerate(slope)]


RISING = falling(0.2, 0.8)
OVERFLOW = {"grad_norm": None, "loss_scale": 65536.0}
KL = {"loss": [0.001, 0.004, 0.008], "kl": [0.025, 0.1, 0.2]}
REPLAY = {"top_p": 0.9, "replay_support": True}
# The sign of each rule, and a near miss.
CASES = {
    "loss_zero": (log(loss=[0.0, -0.0, 1e-4], grad_norm=0.1), log(loss=0.0, grad_norm=0.0)),
    "loss_negative": (log(loss=[0.1, -0.1]), log(loss=[0.1, -1e-4])),
    "loss_is_kl": (log({"beta": 0.04}, **KL), log({"beta": 0.1}, **KL)),
    "kl_absent": (log({"beta": 0.0}, loss=0.1, reward=0.5),
                  log({"beta": 0.04}, loss=0.1, reward=0.5)),
    "kl_zero": (log(kl=[0.0] * WINDOW), log(kl=[0.0] * 7 + [1e-9])),
    "kl_negative": (log(kl=[0.02, -0.01]), log(kl=[0.02, 0.0])),
    "kl_below": (log(kl=[-0.2, 0.1, -0.3]), log(kl=[-0.2, 0.1, 0.1])),
    "kl_large": (log(kl=[1e-9, 0.5], kl_max=[9.0, 308.0]), log(kl=0.1, kl_max=10.0)),
    "entropy_learns": (log(entropy=falling(1.0, 0.4), reward=RISING),
                       log(entropy=falling(1.0, 0.6), reward=RISING)),
    "entropy_falls": (log(entropy=falling(1.0, 0.4), reward=RISING[::-1]),
                      log(entropy=falling(1.0, 0.4), reward=RISING)),
    "entropy_low": (log(entropy=[2.0, *[0.04] * 5]), log(entropy=[0.1, *[0.04] * 5])),
    "clip_zero": (log({"minibatches": 1}, CLIPPED=0.0), log({"minibatches": 2}, CLIPPED=0.0)),
    "ratio_large": (log(ratio_max=[1.0, 55.0]), log(ratio_max=9.0)),
    "groups_equal": (log(groups_equal=[0.5, *[1.0] * WINDOW, 0.5]),
                     log(groups_equal=[0.5, *[1.0] * (WINDOW - 1), 0.5])),
    "gradient": (log(grad_norm=[0.1, math.nan]),
                 ([{"step": 1, **OVERFLOW}, {"step": 2, "grad_norm": 0.1}], {})),
    "loss_scale": (log(**OVERFLOW), log(**OVERFLOW, bad_updates=1)),
    "grad_zero": (log(grad_norm=0.0, reward_std=0.4), log(grad_norm=0.0, reward_std=0.0)),
    "grad_spike": (log(grad_norm=[0.3, 0.4, 0.3, 0.4, 0.3, 4.2]),
                   log(grad_norm=[0.3, 0.4, 0.3, 0.4, 0.3, 1.4])),
    "reward_hacking": (log(reward=RISING, accuracy=RISING[::-1]),
                       log(reward=RISING, accuracy=falling(0.5, 0.47))),
    "truncated": (log({"max_completion_length": 256}, truncated=0.97), log(truncated=0.9)),
    "gap_rounding": (log(sampler_gap=[0.02, 0.03]), log(sampler_gap=0.2)),
    "gap_product": (log(sampler_gap=0.01, RATIO=0.6), log(sampler_gap=0.01, RATIO=0.99)),
    "gap_temperature": (log(sampler_gap=0.2), log(sampler_gap=0.09)),
    "gap_weights": (log(sampler_gap=[0.02, 0.05, *[0.2] * 5]),
                    log(sampler_gap=[0.02, *[0.06] * 5])),
    "gap_tokens": (log(sampler_gap=0.02, sampler_gap_max=14.0),
                   log(sampler_gap=0.02, sampler_gap_max=3.0)),
    "bf16_weights": (log(BF16, learning_rate=1e-6),
                     log(BF16 | {"lora_rank": 8}, learning_rate=1e-6)),
    "answers_late": (log(answers_timed_out=2.0), log(answers_timed_out=0.0)),
    "support_missing": (log(REPLAY, reward=0.5), log(REPLAY, reward=0.5, **{"support/mean": 90.0})),
}  # fmt: skip


# More on either side of a limit, and the rule that sees it.
EDGES = (
    (log({"beta": 1}, loss=[5e-4], grad_norm=[1.0]), "loss_zero"),
    (log({"beta": 1}, loss=[6e-4], grad_norm=[1.0]), ""),
    (log({"beta": 1}, loss=0.0, grad_norm=[0.0, 1.0]), "loss_zero"),
    (log(loss=[-6e-4, -6e-4, 0.0]), "loss_negative"),
    (log(loss=[0.001, 0.004, 0.012], kl=KL["kl"]), ""),
    (log(loss=[0.001, 0.006, 0.012], kl=KL["kl"]), "loss_is_kl"),
    (log(loss=[0.004, 0.001], kl=[0.1, 0.0]), ""),
    (log(loss=0.8, entropy=0.9), ""),
    (log(kl=[-0.1, -0.1]), "kl_negative"),
    (log(kl=[-0.11, -0.11]), "kl_below"),
    (log(old_kl=[-0.001, 0.2]), "kl_negative"),
    (log(kl=[0.1, 10.5, 3.0]), "kl_large"),
    (log(kl=[0.0] * (WINDOW - 1)), ""),
    (log(entropy=0.04), ""),
    (log(entropy=[0.3, 0.06]), ""),
    (log(entropy=[0.3, *[0.06, 0.049, 0.04] * 2]), "entropy_low"),
    (log(entropy=[0.3, *[0.06] * 5, 0.02]), ""),
    (log(entropy=falling(1.0, 0.04, at=5), reward=RISING), "entropy_low"),
    (log(step=[300], entropy=[0.04]), "entropy_low"),
    (log(step=[20], entropy=[0.04]), ""),
    (log(entropy=[1.0 - i / 200 for i in range(180)]), ""),
    (log(entropy=[*[1.0] * 5, *[0.49] * 5]), "entropy_falls"),
    (log(entropy=[*[1.0] * 5, *[0.49] * 4]), ""),
    (log(step=range(0, 90, 3), entropy=falling(1.0, 0.4)), ""),
    (log(step=range(0, 40, 10), entropy=[1.0, 1.0, 0.6, 0.45]), "entropy_falls"),
    (log(step=range(0, 40, 10), entropy=[1.0, 0.8, 0.6, 0.45]), ""),
    (log(CLIPPED=0.0, ratio_max=2.5), ""),
    (log(CLIPPED=[0.0, 0.01]), ""),
    (log({"epochs_per_rollout": 2}, CLIPPED=0.0), ""),
    (log(groups_equal=[1.0]), "groups_equal"),
    (log(groups_equal=[1.0, 0.9]), ""),
    (log(groups_equal=[0.0, 1.0, 1.0] * 20 + [1.0] * 5), ""),
    (log(groups_equal=[0.0, 1.0, 1.0] * 20 + [1.0] * 30), "groups_equal"),
    (log(grad_norm=[0.0, 0.1], reward_std=0.1), ""),
    (log(reward=RISING, held_out_accuracy=falling(0.63, 0.58)), "reward_hacking"),
    (log(reward=RISING, held_out_accuracy=[0.63, *[None] * 28, 0.6]), ""),
    (log(reward=0.5, held_out_accuracy=falling(0.63, 0.5)), ""),
    (log(reward=RISING[::3], held_out_accuracy=[0.6, 0.5, 0.66, 0.62, 0.5] * 2), ""),
    (log(reward=[0.1, 0.5, 0.9], held_out_accuracy=[0.6, None, 0.5],
         held_out_low=0.4, held_out_high=0.7), ""),
    (log(reward=0.5, accuracy=RISING[::-1]), ""),
    (log(reward=RISING, accuracy=[(0.9, 0.1)[i % 2] - i / 300 for i in range(30)]), ""),
    (log(sampler_gap=[0.9]), "gap_temperature"),
    (log(sampler_gap=[1.1]), "gap_tokens"),
    (log(sampler_gap=[0.03, 0.11]), "gap_rounding"),
    (log(sampler_gap=[0.035, *[0.12] * 5]), ""),
    (log(sampler_gap=0.03, RATIO=0.96), "gap_temperature"),
    (log(sampler_gap=0.03, RATIO=0.85), "gap_product"),
    (log(sampler_gap=0.03, RATIO=0.98), "gap_rounding"),
    (log(sampler_gap=0.02, sampler_gap_max=[1.0, 14.0, 2.0]), "gap_rounding"),
    (log(BF16, learning_rate=[4.1e-5, 1e-6]), ""),
    (log(BF16, learning_rate=3.8e-5), "bf16_weights"),
    (log(BF16 | {"weight_size": 0.01}, learning_rate=3.8e-5), ""),
    (log({"dtype": "mixed"}, learning_rate=1e-6), ""),
    (log({"min_p": 0.1, "replay_support": True}, reward=0.5), "support_missing"),
    (log({"top_k": 9, "replay_support": True}, reward=0.5), "support_missing"),
    (log({"top_k": 9, "replay_support": False}, reward=0.5), ""),
    (log({"top_p": 1.0, "replay_support": True}, reward=0.5), ""),
)  # fmt: skip


@pytest.mark.parametrize(("case", "expected"), EDGES)
def test_limits_of_the_rules(case, expected):
    assert names(*case) == expected.split()


def names(rows, options=None, *kinds):
    return [x.rule.name for x in verdicts(rows, options) if not kinds or x.rule.verdict in kinds]


# What some of them say of it.
SAW = {
    "kl_large": "kl_max is 308 at step 2; one token has as much as 616 average ones",
    "entropy_low": "entropy went from 2.00 to 0.040",
    "groups_equal": "groups_equal is 1 at 5 logged steps in a row, the last one 6",
    "truncated": "truncated is 0.95 or more at 8 logged steps in a row, the last one 8, with "
    "max_completion_length = 256",
    "gradient": "grad_norm is nan at step 2",
    "loss_scale": "gradients are too large for float16 at a loss scale of 65536",
    "grad_spike": "at step 6 grad_norm is 4.2, the median so far 0.3",
    "entropy_learns": "from 1.00 to 0.47 by step 22",
    "bf16_weights": "learning_rate is 1e-06 at most, a weight of 0.02 needs 4e-05",
}


@pytest.mark.parametrize("name", RULES)
def test_a_rule_sees_its_sign_and_not_its_near_miss(name):
    sign, near = CASES[name]
    (saw,) = [x.evidence for x in verdicts(*sign) if x.rule.name == name]
    assert SAW.get(name, "") in saw
    assert name not in names(*near)


@pytest.mark.parametrize("name", [x for x in RULES if RULES[x].live])
def test_the_trainer_warns_of_it_once_in_a_while(name):
    """The same comes again after 20 steps; but an update left out is always told."""
    ((first, *_, last), options), (others, near) = CASES[name]
    if name == "groups_equal":
        last = {"groups_equal": 1.0}
    watch, quiet = Watch(options), Watch(near)
    rows = [row | {"step": i} for i, row in enumerate([first, *[last] * 25], 1)]
    told = [x for row in rows for x in watch.after_step(row) if x["rule"] == name]
    assert len(told) == (25 if name == "gradient" else 2)
    assert RULES[name].why in told[0]["text"]
    assert not [x for row in others for x in quiet.after_step(row) if x["rule"] == name]


def test_a_warning_has_the_numbers_and_the_remedy():
    (warning,) = Watch({}).after_step({"step": 7, "kl_max": 50.0})
    assert warning["text"].startswith("kl_max is 50 at step 7. k3 grows exponentially")
    assert "Set kl_clamp" in warning["text"]


def demo_runs():
    runs = json.loads((ROOT / "benchmarks/results/demo.json").read_text())["runs"]["exact"]
    return [log(**run, accuracy=run["right"])[0] for run in runs]


def test_clean_runs_have_nothing_to_look_at():
    """The demo's three runs, but for two spikes that they have; and noise around levels."""
    assert [names(run, {}, "look", "stop") for run in demo_runs()] == [
        ["kl_large"], ["grad_spike"], [],
    ]  # fmt: skip
    draw = random.Random(0).gauss
    for _ in range(5):
        rows = [
            {"step": i, "loss": draw(0.0, 0.05), "grad_norm": math.exp(draw(0, 0.3)), "kl": 0.1,
             "reward": draw(0.5, 0.1), "reward_std": 0.3, "accuracy": draw(0.4, 0.1),
             "groups_equal": random.Random(i).choice((0.0, 0.5, 1.0)) * (i % 3 > 0),
             "entropy": math.exp(draw(0, 0.2)), "truncated": 0.1, "learning_rate": 1e-6,
             "sampler_gap": 0.02, "clip_ratio/region_mean": 0.01, "ratio_max": 1.5}
            for i in range(1, 121)
        ]  # fmt: skip
        options = {"dtype": "mixed", "beta": 0.04, "minibatches": 2, "top_p": 1.0}
        assert names(rows, options) == ["loss_negative", "gap_rounding"]
        watch = Watch(options)
        assert not [x for row in rows for x in watch.after_step(row)]


# Numbers that people posted, in the form in which they came, and what the rules say of them. The
# gaps of TRL #5815 and #7269 and the middle reward of autocontext #1076 are ours.
THREADS = {
    "TRL #3857": (
        "{'loss': 0.0, 'grad_norm': 0.0, 'learning_rate': 1.7050844078611056e-06, 'completions/"
        "clipped_ratio': 0.0, 'rewards/if_rewrite_reward/mean': -3.0, 'reward': 3.0, 'reward_std': "
        "0.0, 'frac_reward_zero_std': 1.0, 'clip_ratio/region_mean': 0.0, 'epoch': 0.33}",
        "kl_absent clip_zero groups_equal", "the log has no kl.",
    ),
    "open-r1 #239": (
        "{'loss': 0.0, 'grad_norm': 1.673892617225647, 'kl': 0.00041866302490234375}\n"
        "{'loss': 0.0, 'grad_norm': 0.9771971106529236, 'kl': 0.0010107040405273437}\n"
        "{'loss': 0.0001, 'grad_norm': 0.4975500702857971, 'reward': 1.420384594798088}",
        "loss_zero", "loss is 0 to 0.0001, grad_norm is 0.498 to 1.67.",
    ),
    "open-r1 #255": (
        "{'loss': 0.0, 'grad_norm': 0.79825, 'rewards/accuracy_reward': 0.15982143627479672, "
        "'reward': 0.7114849153440446, 'kl': 0.0001536548137664795}\n"
        "{'loss': 0.0002, 'grad_norm': 0.84816, 'rewards/accuracy_reward': 0.1178571494296193, "
        "'reward': 0.6940873321145773, 'kl': 0.0039509057998657225}\n"
        "{'loss': 0.0045, 'grad_norm': 1.89251, 'rewards/accuracy_reward': 0.06428571762517095, "
        "'reward': 0.8866595663130283}",
        "loss_zero", "",
    ),
    "train-deepseek-r1 #4": (
        "{'loss': 0.0007, 'grad_norm': 3.265625, 'kl': 0.017456819815561176}\n"
        "{'loss': 0.0009, 'grad_norm': 3.65625, 'kl': 0.02297338340431452}",
        "loss_is_kl", "loss is 0.04 times kl, up to 0.0009.",
    ),
    "unsloth #2291": (
        "Step | Training Loss | reward | reward_std | kl\n-- | -- | -- | -- | --\n"
        "1 | 0.000000 | -17.250000 | 1.500000 | 0.000000\n"
        "9 | 0.000100 | -3.000000 | 1.732051 | 0.001667\n"
        "10 | 0.000100 | -11.500000 | 1.732051 | 0.002300\n",
        "loss_zero", "",
    ),
    "open-r1 #704": (
        "Step | Training Loss | reward | reward_std | completions / clipped_ratio | kl | entropy\n"
        "1 | -0.283600 | 13.437500 | 21.810942 | 0.500000 | nan | 0\n"
        "2 | -0.149100 | 6.931818 | 14.526671 | 0.625000 | nan | No Log\n",
        "loss_negative kl_absent", "Training Loss is -0.284 to -0.149.",
    ),
    "LlamaFactory #1833": ("{'kl': -1.50}", "kl_below", ""),
    "torchforge #664": (
        '{"grpo_loss/kl_divergence_mean": 1568987.96, "grpo_loss/kl_divergence_max": '
        '6821680128.0, "grpo_loss/total_loss": 1.77}',
        "kl_large", "grpo_loss/kl_divergence_max is 6.82e+09 at step 1; one token has as much as "
        "4,348 average ones.",
    ),
    "verl #7412": (
        "(TaskRunner pid=222265) step:34 - actor/entropy:0.22266578674316406 - "
        "actor/pg_clipfrac:0.0007935191160472839 - actor/ppo_kl:-8.163164312320433e-06 - "
        "actor/kl_loss:0.0013280365410537343 - actor/loss:0.042398229241371155 - actor/lr:2e-06",
        "kl_negative", "actor/ppo_kl is -8.16e-06.",
    ),
    "Entropy-Mechanism-of-RL #21": (
        "step:4 - actor/pg_loss:0.025936965830624104 - actor/pg_clipfrac:0.0 - "
        "actor/ppo_kl:0.010411410980547467 - val-core/omni-math/acc/mean@1:0.16129032258064516",
        "kl_absent clip_zero", "",
    ),
    "ms-swift #5571": (
        "'loss': -0.0, 'grad_norm': 0.0, 'learning_rate': 2.6e-07, 'reward': 0.34375, "
        "'reward_std': 0.4397946, 'frac_reward_zero_std': 0.0, 'kl': 0.0, "
        "'clip_ratio/region_mean': 0.0, 'global_step/max_steps': '5/3766'}",
        "clip_zero grad_zero", "",
    ),
    "ms-swift #9261": (
        '{"loss": 0.0, "grad_norm": 0.0, "completions/clipped_ratio": 1.0, "reward": 0.0, '
        '"reward_std": 0.0, "frac_reward_zero_std": 1.0, "entropy/mean": 0.82074341, '
        '"clip_ratio/region_mean": 0.0, "global_step/max_steps": "1/10000"}\n{"loss": 0.0, '
        '"grad_norm": 0.0, "entropy/mean": 0.55015859, "global_step/max_steps": "2/10000"}',
        "kl_absent clip_zero groups_equal truncated", "",
    ),
    "ms-swift #2280": (
        "{'loss': 2.0916357, 'grad_norm': 6.08488035, 'global_step/max_steps': '1/2046'}\n"
        "Train:   0%|    | 1/2046 [00:14<8:16:53, 14.58s/it][h264 @ 0x7fc648030400]\n"
        "{'loss': 2.0832541, 'grad_norm': nan, 'memory(GiB)': 65.89}",
        "gradient", "",
    ),
    "autocontext #1076": (
        '{"reward": 0.65, "held_out_accuracy": 0.63}\n{"reward": 0.7}\n'
        '{"reward": 0.74, "held_out_accuracy": 0.58}',
        "reward_hacking", "reward went from 0.65 to 0.74, held_out_accuracy from 0.63 to 0.58.",
    ),
    "TRL #4772": (f'{{"{GAP}": 0.012}}', "gap_rounding", ""),
    "TRL #5815": (
        f'{{"{GAP}": 0.01, "{RATIO}": 0.569}}',
        "gap_product", f"{GAP} was 0.01 nats at first, 0.01 at last; mean ratio 0.569.",
    ),
    "TRL #6789": (f'{{"{GAP}": 0.105350, "{RATIO}": 0.9}}', "gap_temperature", ""),
    "TRL #7269": (f'{{"{GAP}": 0.036, "{RATIO}": 0.965}}', "gap_temperature", ""),
}  # fmt: skip


@pytest.mark.parametrize("thread", THREADS)
def test_numbers_of_public_threads(tmp_path, thread):
    text, expected, said = THREADS[thread]
    (path := tmp_path / "log.txt").write_text(text)
    found = verdicts(*logs.read(path))
    # The most urgent come first; the order of the table stays within a verdict.
    by_verdict = sorted(expected.split(), key=lambda x: [*VERDICTS].index(RULES[x].verdict))
    assert [x.rule.name for x in found] == by_verdict
    assert said in " ".join(map(str, found))


def state(rows, **more):
    """TRL's trainer_state.json: rows of training, of an evaluation, and the last one's times."""
    ends = [{"epoch": 1.0, "eval_loss": 0.0, "eval_rewards/accuracy_reward/mean": 0.5, "step": 2},
            {"epoch": 1.0, "step": 2, "train_loss": 0.1, "train_runtime": 9.0}]  # fmt: skip
    values = {"best_metric": None, "global_step": 2, "log_history": [*rows, *ends], **more}
    return json.dumps(values, indent=2)


TRL = {
    "loss": 0.1, "grad_norm": 0.3, "frac_reward_zero_std": 0.25, "entropy": 0.8, "reward": 0.5,
    "completions/clipped_ratio": 0.5, GAP: 0.02,
}  # fmt: skip
WANDB = (
    '"Step","lunar-sun-3 - train/kl","lunar-sun-3 - train/kl__MIN","lunar-sun-3 - train/kl__MAX",'
    '"lunar-sun-3 - train/rewards/accuracy_reward/mean"\n'
    '"1","0.02","0.01","0.03","0.5"\n"2","NaN","","",""\n'
)
# A file by its name, in the form in which people have it, and its rows.
FILES = {
    "trainer_state.json": (
        state([{"epoch": 0.5, "step": 1, **TRL}, {"step": 2, "grad_norm": math.nan}]),
        [{"step": 1, "loss": 0.1, "grad_norm": 0.3, "groups_equal": 0.25, "truncated": 0.5,
          "entropy": 0.8, "sampler_gap": 0.02, "reward": 0.5},
         {"step": 2, "grad_norm": math.nan, "held_out_accuracy": 0.5}],
    ),
    "history.json": (
        '[{"kl": 0.1}, 3, {"kl": null, "loss": true}]',
        [{"step": 1, "kl": 0.1}, {"step": 2, "kl": None}],
    ),
    "slurm.out": (
        "Loading, please wait: 3 - 4\n  1%|1 | 1/99 [00:14<8:16:53]{'loss': '0.0', 'kl': '1e-05', "
        "'epoch': '0.01'}\n{'loss': -0.5, 'kl': inf, 'global_step/max_steps': '7/99'}\n",
        [{"step": 1, "loss": 0.0, "kl": 1e-05}, {"step": 7, "loss": -0.5, "kl": math.inf}],
    ),
    "chart.csv": (
        WANDB, [{"step": 1, "kl": 0.02, "accuracy": 0.5}, {"step": 2, "kl": math.nan}],
    ),
    "history.csv": (
        "\ufeff,_step,train/loss,train/reward,_runtime\n0,5,0.25,1,9\n1,6,,2,9\n",
        [{"step": 5, "loss": 0.25, "reward": 1.0}, {"step": 6, "reward": 2.0}],
    ),
    "resumed.jsonl": (
        '{"step": 1, "kl": 1, "loss": 3}\n{"step": 2, "kl": 2}\n{"step": 1, "kl": "4"}\n',
        [{"step": 1, "loss": 3.0, "kl": 4.0}, {"step": 2, "kl": 2.0}],
    ),
    "history.tsv": ("\tstep\tkl\n0\t5\t0.25\n", [{"step": 5, "kl": 0.25}]),
    "verl.jsonl": (
        '{"step": 3, "data": {"actor/entropy": 0.4, "actor/entropy_loss": 9, '
        '"response_length/clip_ratio": 0.1, '
        '"training/rollout_probs_diff_mean": 0.005, "critic/score/mean": 0.5, "actor/lr": 1e-06, '
        '"critic/rewards/mean": 0.4, "val-core/openai/gsm8k/acc/mean@1": 0.7}}\n',
        [{"step": 3, "entropy": 0.4, "truncated": 0.1, "sampler_gap": 0.005, "reward": 0.4,
          "learning_rate": 1e-06, "held_out_accuracy": 0.7}],
    ),
    "metrics.jsonl": (
        '{"step": 1, "loss": null, "clip_low": 0.1, "clip_high": 0.2, "warnings": [{"rule": "a"}]}'
        '\n{"step": 2, "lo',
        [{"step": 0, "held_out_accuracy": 0.25, "held_out_low": 0.1, "held_out_high": None},
         {"step": 1, "loss": None, "clip_low": 0.1, "clip_high": 0.2,
          "clip_ratio/region_mean": pytest.approx(0.3)}],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FILES)
def test_a_log_is_read_in_the_form_that_people_have(tmp_path, name):
    text, expected = FILES[name]
    (path := tmp_path / name).write_text(text)
    (tmp_path / "evaluations.jsonl").write_text(
        '{"step": 0, "accuracy": 0.25, "low": 0.1}\n[]\n{"step": "1"}\n{"st'
    )
    (tmp_path / "config.json").write_text('{"torch_dtype": "bfloat16", "beta": 0.5, "x": "y"}')
    rows, options, _ = logs.read(path)
    if name == "metrics.jsonl":
        assert rows == expected
    else:  # where NaN equals NaN
        assert [repr(sorted(x.items())) for x in rows] == [
            repr(sorted(x.items())) for x in expected
        ]
    known = name in ("trainer_state.json", "metrics.jsonl")
    assert options == ({"dtype": "bf16", "beta": 0.5} if known else {})


def run(folder, **options):
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(options))
    row = {"step": 1, "loss": 0.0, "grad_norm": 1.0, "reward": 0.5, "tokens": 9}
    (folder / "metrics.jsonl").write_text(json.dumps(row))
    return folder


def test_the_command_answers_in_sentences(tmp_path, capsys):
    for name, kl in (("9", 1.0), ("10", 6.8e9)):
        (folder := tmp_path / f"out/checkpoint-{name}").mkdir(parents=True)
        (folder / "config.json").write_text("{}")
        (folder / "trainer_state.json").write_text(state([{"step": 1, **TRL, "kl": kl}]))
    command.main([str(tmp_path / "out")])
    first, finding, normal, last = capsys.readouterr().out.splitlines()
    assert first.startswith(f"1 step of {folder / 'trainer_state.json'}: loss, grad_norm, ")
    assert normal.startswith("normal: sampling/sampling_logp_difference/mean was 0.02 nats at fi")
    assert finding.startswith("look at this: kl is 6.8e+09 at step 1. k3 grows exponentially")
    assert finding.endswith("[torchforge #664, TRL #3015]")
    assert last == "Nothing else stands out."
    shutil.copy(tmp_path / "out/checkpoint-9/trainer_state.json", tmp_path / "out")
    command.main([str(tmp_path / "out")])
    assert f"of {tmp_path / 'out/trainer_state.json'}: loss" in capsys.readouterr().out


def test_a_log_of_something_else_says_so(tmp_path, capsys):
    (path := tmp_path / "sft.jsonl").write_text('{"step": 1, "loss": 1.5, "grad_norm": 1.0}')
    command.main([str(path)])
    assert capsys.readouterr().out.splitlines() == [
        f"1 step of {path}: loss, grad_norm",
        "The log has no reward: most rules are for logs of GRPO, which have one.",
        "Nothing stands out.",
    ]


def test_runs_get_a_page_and_the_rules(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    run(Path("a"), beta=0.0)
    command.main(["a"])
    verdict, *_, page, log, loss, kl, last = capsys.readouterr().out.splitlines()
    assert (verdict, page) == ("No held-out problems were answered.", "page: a/report.html")
    assert log == "1 step of a/metrics.jsonl: loss, grad_norm, reward"
    assert loss.startswith("normal: loss is 0, grad_norm is 1. ")
    assert kl.startswith("normal: the log has no kl. ") and last == "Nothing else stands out."
    command.main(["a/metrics.jsonl"])
    assert capsys.readouterr().out.splitlines() == [log, loss, kl, last]
    run(Path("b"), beta=0.0)
    command.main(["a", "b"])
    Path("b/metrics.jsonl").write_text('{"st')
    command.main(["a", "b", "--output", "all.html"])
    assert sorted(map(str, Path().rglob("*.html"))) == ["a/report.html", "all.html", "runs.html"]


def step_file(folder, **changes):
    """Two groups of two completions of two tokens each; the first group's rewards are equal."""
    tokens = {"position": [0, 1], "entropy": [0.2, 0.4], "kl": [0.1, None],
              "sampler_gap": [-0.02, 0.06], "clip": [0.0, -1.0]}  # fmt: skip
    rows = [
        {"group": i // 2, "reward": reward, "truncated": i == 3, "tokens": tokens | changes}
        for i, reward in enumerate((0.5, 0.5, 0.0, 1.0))
    ]
    (path := folder / "step.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_tokens_of_a_step_are_a_row(tmp_path, capsys):
    row = logs.row_of(exports.read(step_file(tmp_path)))
    assert row == pytest.approx({
        "step": 1, "entropy": 0.3, "entropy_max": 0.4, "kl": 0.1, "kl_max": 0.1,
        "sampler_gap": 0.04, "sampler_gap_max": 0.06, "clip_ratio/region_mean": 0.5,
        "groups_equal": 0.5, "truncated": 0.25,
    })  # fmt: skip
    bare = {"kl": [None, None], "clip": [None, None], "sampler_gap": [None, None]}
    rest = logs.row_of(exports.read(step_file(tmp_path, **bare)))
    assert rest.keys() == {"step", "entropy", "entropy_max", "groups_equal", "truncated"}
    command.main([str(step_file(tmp_path, kl=[0.0, 40.0], clip=[0, 0]))])
    *_, first, second, third, page = capsys.readouterr().out.splitlines()
    assert [x.split(". ")[0] for x in (first, second, third)] == [
        "look at this: kl_max is 40 at step 1",
        "normal: clip_ratio/region_mean is 0 at 1 of 1 steps",
        "normal: sampler_gap was 0.04 nats at first, 0.04 at last, 0.06 at most",
    ]
    assert page.startswith("page: ")


def test_a_run_of_this_trainer_is_read(make, capsys):
    folder = make(steps=2, eval_size=2, beta=0.04).train()
    rows, options, _ = logs.read(folder / "metrics.jsonl")
    assert [row["step"] for row in rows] == [0, 1, 2] and options["beta"] == 0.04
    assert rows[1].keys() >= {
        "loss", "grad_norm", "learning_rate", "reward", "reward_std", "groups_equal", "accuracy",
        "completion_length", "truncated", "kl", "kl_max", "entropy", "clip_ratio/region_mean",
        "ratio_max",
    }  # fmt: skip
    held_out = {"held_out_accuracy", "held_out_low", "held_out_high"}
    assert rows[0].keys() == {"step", *held_out} and rows[2].keys() == rows[1].keys() | held_out
    capsys.readouterr()
    command.main([str(folder)])
    said = capsys.readouterr().out
    assert f"page: {folder / 'report.html'}\n2 steps of {folder / 'metrics.jsonl'}: loss" in said
    assert said.endswith("Nothing else stands out.\n")


def test_the_page_is_that_of_the_table():
    """CONTRIBUTING.md has the command that writes it."""
    page = (ROOT / "docs/normal.md").read_text()
    assert page == rules.markdown()
    assert len(page.split()) <= 1220 and all(rule.source in page for rule in RULES.values())
