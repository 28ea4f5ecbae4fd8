"""From the text of one PTX kernel to a list of instructions, each with its line of Python."""

from __future__ import annotations

import re
from dataclasses import dataclass

_LOC = re.compile(r"\.loc\s+(\d+)\s+(\d+)\s+\d+[^/]*(?://\s*(.*))?")
_FILE = re.compile(r'^\s*\.file\s+(\d+)\s+"([^"]+)"', re.M)
_PARAM = re.compile(r"\.param\s+\.(\w+)\s+(?:[^,()]*\s)?(\w+)(?:\[\d+\])?\s*[,)\n]")
_REG = re.compile(r"\.reg\s+\.(\w+)\s+(%\w+)<\d+>")
_GUARD = re.compile(r"@(!?)(%\w+)\s+")
_LABEL = re.compile(r"([\w$]+):\s*")


@dataclass
class Instruction:
    """`@[!]guard op operands;`, and where in Python it comes from."""

    op: str  # ld.global.v4.b32
    operands: list[str]
    guard: str | None
    negated: bool
    line: int  # of the PTX, from 1
    place: str  # file.py:line:column
    # Undefined where the guard is false, as no earlier instruction wrote the registers.
    undefined: bool = False

    def __str__(self) -> str:
        guard = f"@{'!' * self.negated}{self.guard} " if self.guard else ""
        return f"{guard}{self.op} {', '.join(self.operands)}"


@dataclass(eq=False)
class Program:
    """A kernel: parameters, declarations and instructions."""

    name: str
    params: list[str]
    registers: dict[str, str]  # prefix of a register's name, and its type
    instructions: list[Instruction]
    labels: dict[str, int]  # index of the instruction behind each
    threads: int  # per block
    symbols: set[str]  # names of memory: shared memory, which begins at 0, and strings


def split_operands(text: str) -> list[str]:
    """Splits at the commas that are outside of brackets and braces."""
    parts, depth, begin = [], 0, 0
    for i, c in enumerate(text):
        depth += (c in "[{(") - (c in "]})")
        if c == "," and depth == 0:
            parts.append(text[begin:i].strip())
            begin = i + 1
    rest = text[begin:].strip()
    return [*parts, rest] if rest else parts


def parse(ptx: str) -> Program:
    """Parses the only entry of a module as Triton writes it."""
    head, _, rest = ptx.partition(".visible .entry ")
    name = rest[: rest.index("(")].strip()
    signature, _, rest = rest.partition("\n)")
    header, _, body = rest[: rest.index("// -- End function")].partition("{")
    files = {number: path.rsplit("/", 1)[-1] for number, path in _FILE.findall(ptx)}
    instructions: list[Instruction] = []
    labels: dict[str, int] = {}
    place = "?"
    written: set[str] = set()  # registers
    begun = ""  # a call goes over several lines
    for number, raw in enumerate(body.splitlines(), ptx[: ptx.index(body)].count("\n") + 1):
        located = _LOC.match(raw.strip())
        if located:
            place = located[3] or f"{files.get(located[1], '?')}:{located[2]}"
            continue
        text = begun + raw.split("//", 1)[0].strip()
        begun = f"{text} " if text.startswith("call") and ";" not in text else ""
        for statement in [] if begun else text.split(";"):
            statement = statement.strip()
            while match := _LABEL.match(statement):
                labels[match[1]] = len(instructions)
                statement = statement[match.end() :].strip()
            # Braces at the begin are scopes of inline assembly; those of operands come later.
            statement = statement.lstrip("{} \t")
            if statement and not statement.startswith("."):
                instructions.append(_instruction(statement, number, place, written))
    return Program(
        name,
        [param for _, param in _PARAM.findall(signature + "\n)")],
        {prefix: kind for kind, prefix in _REG.findall(body)},
        instructions,
        labels,
        int(re.search(r"\.(?:req|max)ntid\s+(\d+)", header)[1]),  # type: ignore[index]
        set(re.findall(r"^\.(?:extern|global)\b[^=;]*?([\w$]+)\[", head, re.M)),
    )


def _instruction(statement: str, number: int, place: str, written: set[str]) -> Instruction:
    guard, negated = None, False
    if match := _GUARD.match(statement):
        guard, negated = match[2], match[1] == "!"
        statement = statement[match.end() :]
    op, _, operands = statement.replace("\t", " ").partition(" ")
    made = Instruction(op, split_operands(operands), guard, negated, number, place)
    if made.operands and not made.operands[0].startswith("["):
        registers = set(re.findall(r"%\w+", made.operands[0]))
        made.undefined = guard is not None and not registers <= written
        written |= registers
    return made
