"""Prints the slowest tests, from the reports of pytest runs.

make test ARGS=--junitxml=/tmp/fast.xml
python -m tests.tools.slowest /tmp/fast.xml
"""

import sys
import xml.etree.ElementTree as ElementTree

COUNT = 20


def main(paths: list[str]) -> None:
    seconds: dict[str, float] = {}
    for path in paths:
        for case in ElementTree.parse(path).iter("testcase"):
            name = f"{case.get('classname', '').removeprefix('tests.')}::{case.get('name')}"
            seconds[name] = seconds.get(name, 0.0) + float(case.get("time", 0))
    slowest = sorted(seconds.items(), key=lambda item: -item[1])[:COUNT]
    print(*(f"{s:6.1f} s  {n}" for n, s in slowest), sep="\n")


if __name__ == "__main__":
    main(sys.argv[1:])
