"""Word problems in GSM8K's shape from templates, for machines without its data.

`--dataset examples.word_problems:easy` has problems of one step, `:all_levels` of one and two.

A template is a level, a text, and steps: `a + b`, then perhaps `_ * c`, with `_` for the number
before. Numbers a, b, c are drawn; `p` is a times b, for problems that divide. A worked solution
follows from the steps, in GSM8K's notation.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any, NamedTuple

from grpo_kernels.training import Problem, TrainingConfig, problem_of

LEVELS = (1, 2, 3)
# Held-out problems are of templates that are trained on, or of others.
KINDS = ("seen template", "new template")
# A small model follows examples rather than instructions: one example has two steps, the others
# show one of the remaining kinds each.
PROMPT = (
    "Question: A box holds 4 rows of 6 eggs. Ann takes 5 eggs. How many are left?\n"
    "<think>4 * 6 = 24, 24 - 5 = 19</think><answer>19</answer>\n\n"
    "Question: Bo has 7 stamps and finds 5 more. How many stamps does Bo have?\n"
    "<think>7 + 5 = 12</think><answer>12</answer>\n\n"
    "Question: 12 plums are shared by 3 children. How many plums does each child get?\n"
    "<think>12 / 3 = 4</think><answer>4</answer>\n\n"
    "Question: There are 15 cars. 8 drive away. How many cars are left?\n"
    "<think>15 - 8 = 7</think><answer>7</answer>\n\nQuestion: {}\n"
)


class Template(NamedTuple):
    level: int  # 1: one sum or difference; 2: one step of any kind; 3: two steps
    text: str
    steps: tuple[str, ...]


_PEOPLE = "Ana Ben Cleo Dan Eva Finn Gita Hugo Ida Jon Kim Lea Max Nora Omar Pia Rosa Sam Tom Uma"
_THINGS = "apples pears coins books cards shells pencils stickers marbles buttons eggs cookies"
_PLACES = "a box,a bag,a drawer,a basket,a jar,a case"
# A number that has nothing to do with the question.
_DISTRACTORS = (
    "{name} is {d} years old. ",
    "It is {d} o'clock. ",
    "{friend} lives {d} streets away. ",
    "The bus comes in {d} minutes. ",
    "There are {d} chairs in the room. ",
)

# Every fourth template of a level is held out.
TEMPLATES = tuple(
    Template(level, text, tuple(steps.split("; ")))
    for level, text, steps in (
        (1, "{name} has {a} {things}. {friend} gives {name} {b} more. How many {things} does "
            "{name} have now?", "a + b"),
        (1, "{name} had {a} {things} and lost {b} of them. How many {things} are left?", "a - b"),
        (1, "There are {a} {things} in {place} and {b} {things} on the table. How many {things} "
            "are there in all?", "a + b"),
        (1, "{name} finds {a} {things} in the morning and {b} in the evening. How many {things} "
            "does {name} find that day?", "a + b"),
        (1, "{name} puts {a} {things} into {place}. {friend} takes {b} out. How many {things} are "
            "still in it?", "a - b"),
        (1, "A shop has {a} {things}. It sells {b}. How many {things} does it still have?",
            "a - b"),
        (1, "{name} walked {a} km before lunch and {b} km after lunch. How many km did {name} "
            "walk?", "a + b"),
        (1, "{name} has {a} {things} and {friend} has {b}. How many {things} do they have "
            "together?", "a + b"),
        (1, "A rope is {a} m long. {name} cuts off {b} m. How many m of rope are left?", "a - b"),
        (1, "{name} read {a} pages on Monday and {b} pages on Tuesday. How many pages did {name} "
            "read?", "a + b"),
        (1, "{a} birds sit on a roof. {b} of them fly away. How many birds stay?", "a - b"),
        (1, "{name} needs {a} {things} and has {b}. How many more {things} does {name} need?",
            "a - b"),
        (1, "A bowl holds {a} cups of flour. {name} adds {b} cups. How many cups of flour are in "
            "the bowl?", "a + b"),
        (1, "{name} had {a} dollars and spent {b} dollars. How many dollars does {name} have "
            "left?", "a - b"),
        (1, "{a} children play outside. {b} more join them. How many children play now?", "a + b"),
        (1, "{name} is {a} years old. How old will {name} be in {b} years?", "a + b"),
        (2, "{name} buys {a} bags. There are {b} {things} in each bag. How many {things} does "
            "{name} buy?", "a * b"),
        (2, "{name} shares {p} {things} equally among {a} friends. How many {things} does each "
            "friend get?", "p / a"),
        (2, "A pencil costs {a} dollars. {name} buys {b} pencils. How many dollars does {name} "
            "pay?", "a * b"),
        (2, "{name} has {p} {things} and puts {a} into every box. How many boxes does {name} "
            "fill?", "p / a"),
        (2, "There are {a} rows of {b} chairs. How many chairs are there?", "a * b"),
        (2, "{name} has {a} {things}. {friend} has {b} times as many. How many {things} does "
            "{friend} have?", "a * b"),
        (2, "A car needs {a} liters of fuel for a trip. How many liters do {b} such trips need?",
            "a * b"),
        (2, "A ribbon of {p} cm is cut into {a} equal pieces. How many cm long is each piece?",
            "p / a"),
        (2, "{name} runs {a} km every day. How many km does {name} run in {b} days?", "a * b"),
        (2, "{name} has {p} {things}, {a} times as many as {friend}. How many {things} does "
            "{friend} have?", "p / a"),
        (2, "{p} children form teams of {a}. How many teams are there?", "p / a"),
        (2, "One box weighs {a} kg. How many kg do {b} such boxes weigh?", "a * b"),
        (2, "{name} has {a} {things}, {b} more than {friend}. How many {things} does {friend} "
            "have?", "a - b"),
        (2, "{name} reads {a} pages per day. How many days does a book of {p} pages take?",
            "p / a"),
        (2, "{name} has {a} {things}, {b} fewer than {friend}. How many {things} does {friend} "
            "have?", "a + b"),
        (2, "A spider has 8 legs. How many legs do {b} spiders have?", "8 * b"),
        (3, "{name} has {a} {things} and buys {b} more. Then {name} gives {c} to {friend}. How "
            "many {things} does {name} have left?", "a + b; _ - c"),
        (3, "{name} buys {a} boxes of {b} {things} and eats {c} of the {things}. How many are "
            "left?", "a * b; _ - c"),
        (3, "{place_} holds {a} {things} and another {b} {things}. {friend} doubles them. How many "
            "{things} are there then?", "a + b; _ * 2"),
        (3, "{name} has {a} bags of {b} {things} and {c} more {things}. How many {things} does "
            "{name} have?", "a * b; _ + c"),
        (3, "{name} had {a} {things}, lost {b} and found {c}. How many {things} does {name} have "
            "now?", "a - b; _ + c"),
        (3, "{name} shares {p} {things} equally among {a} children. {friend} is one of them and "
            "already has {c}. How many {things} does {friend} have then?", "p / a; _ + c"),
        (3, "A ticket costs {a} dollars. {name} buys {b} tickets and a drink for {c} dollars. How "
            "many dollars does {name} pay?", "a * b; _ + c"),
        (3, "{name} has {a} {things} and {friend} has {b} more than {name}. How many {things} do "
            "they have together?", "a + b; a + _"),
        (3, "{name} saves {a} dollars per week for {b} weeks and then spends {c} dollars. How many "
            "dollars are left?", "a * b; _ - c"),
        (3, "{a} people are on a bus. {b} get off and {c} get on. How many people are on the bus "
            "now?", "a - b; _ + c"),
        (3, "{name} has {a} red {things} and {b} blue {things}, and puts them into {c} equal "
            "groups. How many {things} are in each group?", "a + b; _ / c"),
        (3, "{name} picks {a} {things} and {friend} picks {b} times as many. How many {things} do "
            "they pick together?", "a * b; a + _"),
        (3, "A book has {p} pages. {name} reads {a} pages per day and has read for {c} days. How "
            "many pages are left?", "a * c; p - _"),
        (3, "{name} bakes {p} cookies, packs them into bags of {a}, and sells {c} bags. How many "
            "bags are left?", "p / a; _ - c"),
        (3, "{name} buys {a} {things} for {b} dollars each and pays with {m} dollars. How many "
            "dollars does {name} get back?", "a * b; m - _"),
        (3, "{name} walks {a} km to school and {a} km back, on {b} days. How many km does {name} "
            "walk?", "a + a; _ * b"),
    )
)  # fmt: skip

# Templates that are never trained on: every fourth.
NEW = frozenset(range(3, len(TEMPLATES), 4))


def easy(config: TrainingConfig) -> tuple[list[Problem], list[Problem]]:
    """Problems of levels 1 and 2."""
    return problems(config, LEVELS[:2])


def all_levels(config: TrainingConfig) -> tuple[list[Problem], list[Problem]]:
    """Problems of all levels."""
    return problems(config, LEVELS)


def problems(config: TrainingConfig, levels: Sequence[int]) -> tuple[list[Problem], list[Problem]]:
    """Returns problems; of those held out, half are of templates that are trained on."""
    half, rest = config.eval_size // 2, config.eval_size % 2
    # The same problems for every seed, so that runs can be compared.
    train = word_problems(config.train_size, 0, levels)
    seen = word_problems(half + rest, 0, levels, held_out=KINDS[0])
    new = word_problems(half, 0, levels, held_out=KINDS[1])
    for row in (*train, *seen, *new):
        if not config.chat:
            row["prompt"] = PROMPT.format(row["question"])
    return [problem_of(row, config) for row in train], [
        problem_of(row, config) for row in seen + new
    ]


def word_problems(
    count: int, seed: int, levels: Sequence[int] = LEVELS, held_out: str | None = None
) -> list[dict[str, Any]]:
    """Different problems, the same for every call with the same arguments.

    Args:
        count: number of problems.
        seed: of the draws.
        levels: levels of the problems, equally often.
        held_out: None for problems to train on, or one of `KINDS`; "seen template" has numbers
            that are never trained on together.

    Returns:
        Rows with `question`, `answer` (a worked solution, and the number after `####`), `level` and
        `template` (its place in `TEMPLATES`).
    """
    rows: dict[str, dict[str, Any]] = {}
    draw = random.Random(f"{seed}-{held_out}")
    places = {
        level: [i for i, template in enumerate(TEMPLATES)
                if template.level == level and (i in NEW) == (held_out == KINDS[1])]
        for level in levels
    }  # fmt: skip
    while len(rows) < count:
        level = levels[len(rows) % len(levels)]
        row = _problem(draw.choice(places[level]), draw, held_out)
        if row is not None:
            rows.setdefault(row["question"], row)
    return list(rows.values())


def _problem(place: int, draw: random.Random, held_out: str | None) -> dict[str, Any] | None:
    """A problem of a template; None where the numbers that were drawn make none."""
    template = TEMPLATES[place]
    largest = 20 if template.level > 1 and not set("*/") & set("".join(template.steps)) else 9
    used = " ".join(template.steps).replace("p", "a * b")
    a, b, c = (draw.randint(2, largest) if letter in used else 0 for letter in "abc")
    if held_out != KINDS[1] and _kept_apart(a, b, c) != (held_out == KINDS[0]):
        return None
    numbers = {"a": a, "b": b, "c": c, "p": a * b, "m": (a * b // 10 + 1) * 10}
    steps = _solve(template.steps, numbers)
    if not steps:
        return None
    name, friend = draw.sample(_PEOPLE.split(), 2)
    box = draw.choice(_PLACES.split(","))
    words = {"name": name, "friend": friend, "things": draw.choice(_THINGS.split())}
    words |= {"place": box, "place_": box.capitalize()}
    distractor = draw.choice(_DISTRACTORS) if template.level > 1 and draw.random() < 1 / 3 else ""
    lines = [f"{x} {sign} {y} = <<{x}{sign}{y}={z}>>{z}" for x, sign, y, z in steps]
    return {
        "question": (distractor + template.text).format(**words, **numbers, d=draw.randint(2, 12)),
        "answer": "\n".join([*lines, f"#### {steps[-1][-1]}"]),
        "level": template.level, "template": place,
    }  # fmt: skip


def _kept_apart(a: int, b: int, c: int) -> bool:
    """True for numbers that are held out, a fifth, in either order of the first two."""
    return (a * b + a + b + 3 * c) % 5 == 0


def _solve(steps: Sequence[str], numbers: dict[str, int]) -> list[tuple[int, str, int, int]]:
    """Each step as left, sign, right, result; none unless all results are positive and whole."""
    solved: list[tuple[int, str, int, int]] = []
    for step in steps:
        known = {**numbers, "_": solved[-1][-1] if solved else 0}
        left, sign, right = step.split()
        x, y = (known[part] if part in known else int(part) for part in (left, right))
        if sign == "/" and x % y:
            return []
        z = {"+": x + y, "-": x - y, "*": x * y, "/": x // y}[sign]
        if z < 1:
            return []
        solved.append((x, sign, y, z))
    return solved
