"""Rows of files and folders of problems, each with its name in errors, `line 3 of x.jsonl`."""

from __future__ import annotations

import codecs
import csv
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

# Each row with its name in errors.
Rows = Iterable[tuple[str, Mapping[str, Any]]]


def rows_of_file(name: str) -> Rows:
    """The rows of a file, in the format of its ending. Values keep the file's types.

    Raises:
        ValueError: there is no such file, no reader of its format, or it is not in this format.
    """
    if not Path(name).is_file():
        raise ValueError(f"dataset: expected a file or folder; {name} does not exist")
    if (ending := Path(name).suffix.lower()) not in FORMATS:
        raise ValueError(f"dataset: expected a file {', '.join(FORMATS)}; got {name}")
    return FORMATS[ending](name)


def splits_of_folder(name: str) -> Mapping[str, Rows]:
    """The rows of a folder by split; "" if it was saved without.

    Raises:
        ValueError: the folder has no dataset.
    """
    import datasets

    folder = Path(name).absolute()  # not mistaken for a dataset or a format
    try:
        saved = any((folder / x).is_file() for x in ("state.json", "dataset_dict.json"))
        read = datasets.load_from_disk if saved else datasets.load_dataset
        loaded = read(str(folder))
    except Exception as error:  # each reader raises its own
        # The cause has the message of `datasets`, in many lines.
        why = " ".join(str(error.__cause__ or error).split())
        raise ValueError(
            f"dataset: expected a dataset in the folder {name}; {type(error).__name__}: {why:.200}"
        ) from error
    if isinstance(loaded, datasets.Dataset):
        return {"": numbered(loaded, name)}
    return {split: numbered(loaded[split], f"split {split} of {name}") for split in loaded}


def numbered(rows: Iterable[Mapping[str, Any]], name: str) -> Rows:
    """The rows, each with its number as its place."""
    return ((f"row {i} of {name}", row) for i, row in enumerate(rows, 1))


def _lines(name: str) -> Rows:
    """The rows of a file with one object of JSON per line."""
    with open(name, "rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            where = f"line {number} of {name}"
            try:
                row = json.loads(line)
            except ValueError as error:
                raise ValueError(f"dataset: expected JSON in {where}; {error}") from error
            yield _object(where, row)


def _list(name: str) -> Rows:
    """The rows of a file with a list of objects, or with an object per line."""
    content = Path(name).read_bytes().removeprefix(codecs.BOM_UTF8)
    if not content.lstrip().startswith(b"["):
        yield from _lines(name)
        return
    try:
        rows = json.loads(content)
    except ValueError as error:
        raise ValueError(f"dataset: expected JSON in {name}; {error}") from error
    for where, row in numbered(rows, name):
        yield _object(where, row)


def _object(where: str, row: Any) -> tuple[str, Mapping[str, Any]]:
    if not isinstance(row, dict):
        raise ValueError(f"dataset: expected an object in {where}; got {row!r:.80}")
    return where, row


def _table(name: str) -> Rows:
    """The rows of a CSV file. All values are text; an empty value is None."""
    with open(name, encoding="utf-8-sig", newline="") as file:
        reader = csv.DictReader(file, strict=True)
        try:
            for row in reader:
                where = f"line {reader.line_num} of {name}"
                if None in row or None in row.values():
                    raise ValueError(f"expected {len(reader.fieldnames or ())} values in {where}")
                yield where, {key: value or None for key, value in row.items()}
        except (csv.Error, ValueError) as error:
            raise ValueError(f"dataset: {name} is no table of values; {error}") from error


def _parquet(name: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    from pyarrow.parquet import ParquetFile

    try:
        with ParquetFile(name) as file:
            rows = [row for batch in file.iter_batches() for row in batch.to_pylist()]
    except Exception as error:  # the reader raises errors of its own
        raise ValueError(
            f"dataset: expected rows of parquet in {name}; {type(error).__name__}: {error}"
        ) from error
    yield from numbered(rows, name)


FORMATS: dict[str, Callable[[str], Rows]] = {
    ".jsonl": _lines, ".json": _list, ".csv": _table, ".parquet": _parquet,
}  # fmt: skip
