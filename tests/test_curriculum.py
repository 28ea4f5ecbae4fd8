"""Which problems come next: shuffled epochs, and levels that open by measured accuracy."""

from itertools import islice

import pytest
import torch

from grpo_kernels.training import TrainingConfig
from grpo_kernels.training.data import Course, shuffled_epochs
from tests.helpers.trainer_runs import config_of, noise, rows_of, trainer_of

LEVELS = [1, 2, 3, 2, 1, 3, 1, 2]
PROBLEMS = [{"prompt": str(i), "answer": "1", "level": level} for i, level in enumerate(LEVELS)]


def accuracy(level, value):
    return {f"accuracy/level_{level}": value}


def levels_of(course, count):
    return {problem["level"] for problem in course.next(count)}


def test_without_a_threshold_all_levels_come():
    course = Course(PROBLEMS, 3, 0.0)
    order = [PROBLEMS[i] for i in islice(shuffled_epochs(8, 3), 24)]
    assert [course.next(5) for _ in range(4)] == [order[i : i + 5] for i in range(0, 20, 5)]
    assert course.level is None and course.open == PROBLEMS


def test_a_level_opens_when_the_one_below_is_solved():
    course = Course(PROBLEMS, 0, 0.5)
    assert course.level == 1 and levels_of(course, 20) == {1}
    # A mean of three steps; those without a problem of the level do not count.
    for row in (accuracy(1, 1.0), accuracy(1, 0.2), {}, accuracy(2, 1.0)):
        course.after_step(row)
        assert course.level == 1
    course.after_step(accuracy(1, 0.2))
    assert course.level == 1
    course.after_step(accuracy(1, 1.1))
    assert course.level == 2 and levels_of(course, 40) == {1, 2}
    # The next one is judged by itself.
    for _ in range(3):
        assert course.level == 2
        course.after_step(accuracy(1, 1.0) | accuracy(2, 0.5))
    assert course.level == 3 and course.open == PROBLEMS
    for _ in range(5):
        course.after_step(accuracy(3, 1.0))
    assert course.level == 3 and levels_of(course, 40) == {1, 2, 3}


def test_of_what_is_open_nothing_is_left_out():
    drawn = [problem["prompt"] for problem in Course(PROBLEMS, 1, 0.5).next(9)]
    assert [sorted(drawn[i : i + 3]) for i in (0, 3, 6)] == [["0", "4", "6"]] * 3


def test_its_state_goes_on():
    rows = [accuracy(1, 0.6), accuracy(1, 0.6), accuracy(1, 0.6), accuracy(2, 0.9)]
    whole, part = Course(PROBLEMS, 2, 0.5), Course(PROBLEMS, 2, 0.5)
    for course, count in ((whole, 4), (part, 2)):
        for row in rows[:count]:
            course.next(3)
            course.after_step(row)
    rest = Course(PROBLEMS, 2, 0.5)
    rest.restore(part.state())
    for row in rows[2:]:
        rest.next(3)
        rest.after_step(row)
    assert rest.state() == whole.state() and rest.level == whole.level == 2
    assert rest.next(9) == whole.next(9)


def test_a_step_that_failed_is_drawn_again():
    course, rest = Course(PROBLEMS, 2, 0.0), Course(PROBLEMS, 2, 0.0)
    course.next(3)
    course.after_step({})
    problems = course.next(3)
    rest.restore(course.state())
    assert rest.next(3) == problems


def test_an_interrupted_step_comes_again():
    course = Course(PROBLEMS, 2, 0.0)
    problems = course.next(3)
    course.restore(course.state())
    assert course.next(3) == problems


@pytest.mark.parametrize("level", (None, "easy", True, float("nan")))
def test_levels_are_numbers(level):
    problems = [*PROBLEMS, {"prompt": "x", "answer": "1", "level": level}]
    with pytest.raises(ValueError, match="curriculum: expected a number as the level of every"):
        Course(problems, 0, 0.5)


def test_answers_are_needed():
    with pytest.raises(ValueError, match="problem, and an answer; got 1 and None"):
        Course([{"prompt": "x", "level": 1}], 0, 0.5)


def test_not_with_groups_that_are_replaced():
    with pytest.raises(ValueError, match="curriculum: expected 0 with resample_equal_groups"):
        TrainingConfig(model="m", curriculum=0.5, resample_equal_groups=1)


@pytest.mark.parametrize("value", (-0.1, 1.5))
def test_thresholds_are_shares(value):
    with pytest.raises(ValueError, match=r"curriculum: expected a number in \[0, 1\]; got"):
        TrainingConfig(model="m", curriculum=value)


def run(model, tmp_path, **options):
    """A run in which every answer of level 1 is right and none of another."""
    seen = []
    config = config_of(
        model, tmp_path, dataset="word_problems", train_size=30, max_prompt_length=2000, **options
    )
    trainer = trainer_of(config, rewards={"noise": noise})
    right = {p["answer"] for p in trainer.train_problems if p["level"] == 1}
    trainer.is_correct = lambda text, answer: answer in right
    folder = trainer.train(lambda row, samples: seen.append(samples))
    return rows_of(folder), seen, trainer


@pytest.mark.usefixtures("real_memory", "curves")
def test_the_trainer_follows_it(tiny_model, tmp_path):
    rows, seen, _ = run(tiny_model, tmp_path, steps=5, curriculum=0.9)
    assert [row["level"] for row in rows] == [1, 1, 1, 2, 2]
    levels = [{problem["level"] for problem in samples.problems} for samples in seen]
    assert levels[:3] == [{1}] * 3 and levels[3] | levels[4] == {1, 2}
    for row, samples in zip(rows, seen, strict=True):
        correct, of = torch.tensor(samples.correct), torch.tensor(samples.levels)
        for level in of.unique().tolist():
            assert row[f"accuracy/level_{level:g}"] == float(correct[of == level].double().mean())


@pytest.mark.usefixtures("real_memory", "curves")
def test_a_resumed_run_goes_on_in_it(tiny_model, tmp_path):
    options = {"curriculum": 0.9, "save_every": 1}
    whole, _, _ = run(tiny_model, tmp_path / "whole", steps=5, **options)
    run(tiny_model, tmp_path / "parts", steps=2, **options)
    parts, seen, _ = run(tiny_model, tmp_path / "parts", steps=5, resume=True, **options)
    assert parts == whole and len(seen) == 3


@pytest.mark.usefixtures("real_memory", "curves")
def test_without_levels_there_is_none(tiny_model, tmp_path):
    rows = rows_of(trainer_of(config_of(tiny_model, tmp_path)).train())
    assert not any("level" in name for row in rows for name in row)
    with pytest.raises(ValueError, match="curriculum: expected a number as the level of every"):
        trainer_of(config_of(tiny_model, tmp_path, curriculum=0.5, name="other"))
