"""Puts the slowest tests into docs/testing.md, from the reports of pytest runs.

make test ARGS=--junitxml=/tmp/fast.xml
python -m tests.tools.slowest /tmp/fast.xml
"""

import sys
import xml.etree.ElementTree as ElementTree

from tests.tools.tables import write_table

COUNT = 5


def main(paths: list[str]) -> None:
    seconds: dict[str, float] = {}
    for path in paths:
        for case in ElementTree.parse(path).iter("testcase"):
            name = f"{case.get('classname', '').removeprefix('tests.')}::{case.get('name')}"
            seconds[name] = seconds.get(name, 0.0) + float(case.get("time", 0))
    slowest = sorted(seconds.items(), key=lambda item: -item[1])[:COUNT]
    write_table("slowest", ("seconds", "test"), [(f"{s:.1f}", f"`{n}`") for n, s in slowest])


if __name__ == "__main__":
    main(sys.argv[1:])
