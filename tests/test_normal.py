"""Rules that tell whether a number is normal, on planted signs; logs as people have them."""

import json
import math
import random
from pathlib import Path

import pytest

from grpo_kernels.explain import __main__ as command
from grpo_kernels.explain import exports, logs, rules
from grpo_kernels.explain.rules import RULES, WINDOW, Watch, verdicts

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
    (log({"beta": 1}, loss=[6e-4], grad_norm=[1.0]), ""),
    (log(loss=[0.001, 0.006, 0.012], kl=KL["kl"]), "loss_is_kl"),
    (log(loss=[0.004, 0.001], kl=[0.1, 0.0]), ""),
    (log(loss=[0.0007, 0.0009], kl=[0.01746, 0.02297]), "loss_is_kl"),  # train-deepseek-r1 #4
    (log({"beta": 1}, loss=0.0, reward_std=0.4), "loss_zero"),
    (log(loss=0.8, entropy=0.9), ""),
    (log(kl=[-0.11, -0.11]), "kl_below"),
    (log(old_kl=[-0.001, 0.2]), "kl_negative"),
    (log(entropy=[0.3, *[0.06, 0.049, 0.04] * 2]), "entropy_low"),
    (log(entropy=[0.3, *[0.06] * 5, 0.02]), ""),
    (log(entropy=falling(1.0, 0.04, at=5), reward=RISING), "entropy_low"),
    (log(step=[300], entropy=[0.04]), "entropy_low"),
    (log(entropy=[1.0 - i / 200 for i in range(180)]), ""),
    (log(entropy=[*[1.0] * 5, *[0.49] * 5]), "entropy_falls"),
    (log(step=range(0, 40, 10), entropy=[1.0, 1.0, 0.6, 0.45]), "entropy_falls"),
    (log(step=range(0, 90, 3), entropy=falling(1.0, 0.4)), ""),
    (log(CLIPPED=0.0, ratio_max=2.5), ""),
    (log({"epochs_per_rollout": 2}, CLIPPED=0.0), ""),
    (log(groups_equal=[1.0]), "groups_equal"),
    (log(groups_equal=[1.0, 0.9]), ""),
    (log(groups_equal=[0.0, 1.0, 1.0] * 20 + [1.0] * 5), ""),
    (log(groups_equal=[0.0, 1.0, 1.0] * 20 + [1.0] * 30), "groups_equal"),
    (log(reward=RISING, held_out_accuracy=falling(0.63, 0.58)), "reward_hacking"),
    (log(reward=RISING, held_out_accuracy=[0.63, *[None] * 28, 0.6]), ""),
    (log(reward=RISING[::3], held_out_accuracy=[0.6, 0.5, 0.66, 0.62, 0.5] * 2), ""),
    (log(reward=[0.1, 0.5, 0.9], held_out_accuracy=[0.6, None, 0.5],
         held_out_low=0.4, held_out_high=0.7), ""),
    (log(reward=RISING, accuracy=[(0.9, 0.1)[i % 2] - i / 300 for i in range(30)]), ""),
    (log(sampler_gap=[0.9]), "gap_temperature"),
    (log(sampler_gap=[1.1]), "gap_tokens"),
    (log(sampler_gap=0.03, RATIO=0.85), "gap_product"),
    (log(sampler_gap=[0.035, *[0.12] * 5]), ""),
    (log(sampler_gap=0.03, RATIO=0.96), "gap_temperature"),
    (log(sampler_gap=0.02, sampler_gap_max=[1.0, 14.0, 2.0]), "gap_rounding"),
    (log(BF16, learning_rate=[4.1e-5, 1e-6]), ""),
    (log(BF16, learning_rate=3.8e-5), "bf16_weights"),
    (log(BF16 | {"weight_size": 0.01}, learning_rate=3.8e-5), ""),
    (log({"min_p": 0.1, "replay_support": True}, reward=0.5), "support_missing"),
    (log({"top_k": 9, "replay_support": True}, reward=0.5), "support_missing"),
    (log({"top_k": 9, "replay_support": False}, reward=0.5), ""),
)  # fmt: skip


@pytest.mark.parametrize(("case", "expected"), EDGES)
def test_limits_of_the_rules(case, expected):
    assert names(*case) == expected.split()


def names(rows, options=None, *kinds):
    return [x.rule.name for x in verdicts(rows, options) if not kinds or x.rule.verdict in kinds]


# What some of them say of it.
SAW = {
    "kl_large": "kl_max is 308 at step 2; one token has as much as 616 average ones",
    "truncated": "truncated is 0.95 or more at 8 logged steps in a row, the last one 8, with "
    "max_completion_length = 256",
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
    "notebook.txt": (  # open-r1 #704
        "Step | Training Loss | completions / clipped_ratio | kl | entropy\n"
        "1 | -0.283600 | 0.500000 | nan | 0\n2 | -0.149100 | 0.625000 | nan | No Log\n",
        [{"step": 1, "loss": -0.2836, "truncated": 0.5, "kl": math.nan, "entropy": 0.0},
         {"step": 2, "loss": -0.1491, "truncated": 0.625, "kl": math.nan}],
    ),
    "console.txt": (  # verl #7412
        "(TaskRunner pid=222265) step:34 - actor/entropy:0.22266 - actor/pg_clipfrac:0.00079 - "
        "actor/ppo_kl:-8.163164312320433e-06 - actor/kl_loss:0.0013 - actor/lr:2e-06",
        [{"step": 34, "entropy": 0.22266, "clip_ratio/region_mean": 0.00079,
          "old_kl": -8.163164312320433e-06, "kl": 0.0013, "learning_rate": 2e-06}],
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
    (run(Path("b"), beta=0.0) / "metrics.jsonl").write_text('{"st')
    command.main(["a", "b"])
    assert sorted(map(str, Path().rglob("*.html"))) == ["a/report.html", "runs.html"]


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
    command.main([str(step_file(tmp_path, kl=[0.0, 40.0]))])
    assert "look at this: kl_max is 40 at step 1" in capsys.readouterr().out


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
    assert rows[0].keys() == {"step", *held_out}
    capsys.readouterr()
    command.main([str(folder)])
    assert capsys.readouterr().out.endswith("Nothing else stands out.\n")


def test_the_page_is_that_of_the_table():
    """CONTRIBUTING.md has the command that writes it."""
    page = (ROOT / "docs/normal.md").read_text()
    assert page == rules.markdown()
    assert len(page.split()) <= 1220 and all(rule.source in page for rule in RULES.values())
