"""Files of a run: figures as JSON lines or CSV, and TensorBoard's events."""

from __future__ import annotations

import csv
import json
import math
import os
import pathlib
from collections.abc import Iterable, Iterator
from typing import Any, TextIO

import numpy as np

from keras_policy_ext.ext.sampling.samples import (
    COLUMNS,
    FIGURES,
    KEYS,
    Measured,
    Row,
    Samples,
)

SUFFIXES = (".jsonl", ".csv")

_LONGEST = 1 << 20
"""Bytes that the last line of a file has at most."""

_LARGEST = float(np.finfo("float32").max)


class RowFile:
    """A file that rows are appended to: JSON lines, or CSV with a header.

    Args:
        path: Its suffix decides: `.jsonl` or `.csv`.

    A line that another run did not write to its end is removed by the first
    rows, so that they are on lines of their own.

    Raises:
        ValueError: If the suffix is another one, there is no such folder, or
            a file that is there has other columns.
    """

    def __init__(self, path: str | os.PathLike[str]):
        self._path = pathlib.Path(path)
        _check_suffix(self._path, "`path`")
        if not self._path.parent.is_dir():
            raise ValueError(
                f"`path` cannot be written. Received: {str(path)!r}, whose "
                "folder does not exist. Allowed: a path in a folder that "
                "does. Make the folder first."
            )
        self._is_new = not self._path.exists() or not self._path.stat().st_size
        self._is_first = True
        if self._path.suffix == ".csv" and not self._is_new:
            with self._path.open(encoding="utf-8", newline="") as file:
                _check_columns(next(csv.reader(file), []), self._path)

    def append(self, rows: Iterable[Row]) -> None:
        """Append rows; None is `null` in JSON and empty in CSV."""
        if self._is_first and not self._is_new:
            _end_last_line(self._path)
            self._is_new = not self._path.stat().st_size
        self._is_first = False
        with self._path.open("a", encoding="utf-8", newline="") as file:
            if self._path.suffix == ".jsonl":
                file.writelines(json.dumps(row) + "\n" for row in rows)
                return
            writer = csv.DictWriter(file, COLUMNS)
            if self._is_new:
                writer.writeheader()
                self._is_new = False
            writer.writerows(rows)


def _end_last_line(path: pathlib.Path) -> None:
    """Remove a last line that was not written to its end."""
    with path.open("rb+") as file:
        before = max(file.seek(0, os.SEEK_END) - _LONGEST, 0)
        file.seek(before)
        data = file.read()
        start = data.rfind(b"\n") + 1
        last = data[start:]
        if not last or (before and not start):
            return
        if path.suffix == ".jsonl":
            try:
                json.loads(last)
            except (ValueError, RecursionError):
                pass
            else:
                file.write(b"\n")  # Only the newline was missing.
                return
        file.truncate(before + start)


class EventFile:
    """An event file of TensorBoard, written by TensorBoard's own writer.

    Args:
        log_dir: The folder; the file in it is made by the first sample.

    Raises:
        ImportError: If TensorBoard is not installed.
    """

    def __init__(self, log_dir: str | os.PathLike[str]):
        try:
            from tensorboard.summary import Writer
        except ImportError as error:
            raise ImportError(
                "TensorBoard, which writes event files, is not installed. "
                f"Received: log_dir={str(log_dir)!r}. Run `pip install "
                "tensorboard`, or pass `path` for a file of JSON lines or CSV."
            ) from error
        self._make, self._log_dir = Writer, str(log_dir)
        self._writer: Any = None

    def append(self, rows: Iterable[Row]) -> None:
        """Write each figure of rows as a scalar `float8_<figure>/<operand>`."""
        if self._writer is None:
            self._writer = self._make(self._log_dir)
        for row in rows:
            names = [row[key] for key in KEYS]
            for figure in FIGURES:
                if row[figure] is not None:
                    tag = "/".join([f"float8_{figure}", *names])
                    self._writer.add_scalar(tag, row[figure], row["step"])
        self._writer.flush()


def read(path: str | os.PathLike[str]) -> tuple[pathlib.Path, Samples, int]:
    """Read what a run left.

    A last line that was not written to its end is left out.

    Args:
        path: A file that `RowFile` wrote, or a folder with one such file.

    Returns:
        The file, the samples of its last run, and the number of runs: where a
        step does not follow the step before it, another run begins.

    Raises:
        ValueError: If there is no such file, or it has other content.
    """
    file = _found(pathlib.Path(path))
    samples, runs = Samples(), 0
    for step, rows in _by_step(_rows(file)):
        if samples.last_step is None or step <= samples.last_step:
            samples, runs = Samples(), runs + 1
        found, unexamined = {}, {}
        for row in rows:
            layer, kernel, operand = (row[key] for key in KEYS)
            if not operand:
                unexamined[layer] = row["note"]
                continue
            values = [row[name] for name in FIGURES]
            figures = [math.nan if x is None else x for x in values]
            measured = Measured(figures, int(row["uses"]), row["note"])
            found[layer, kernel, operand] = measured
        samples.add(step, found, unexamined)
    if not runs:
        raise ValueError(
            f"{str(file)!r} has no sample. Allowed: a file that "
            "keras_policy_ext.watch or Float8Monitor wrote by `path=`."
        )
    return file, samples, runs


def _found(path: pathlib.Path) -> pathlib.Path:
    if not path.is_dir():
        if not path.is_file():
            raise ValueError(f"there is no file {str(path)!r}")
        _check_suffix(path, "the file of a run")
        return path
    files = sorted(p for p in path.iterdir() if p.suffix in SUFFIXES)
    if len(files) != 1:
        named = ", ".join(file.name for file in files) or "none"
        raise ValueError(
            f"the folder of a run has one {' or '.join(SUFFIXES)} file. "
            f"Received: {str(path)!r} with {named}. Pass the path of a file."
        )
    return files[0]


def _check_suffix(path: pathlib.Path, name: str) -> None:
    if path.suffix not in SUFFIXES:
        raise ValueError(
            f"{name} has no suffix of a format. Received: {str(path)!r}. "
            "Allowed: '.jsonl' for JSON lines, or '.csv'. Change the suffix."
        )


def _check_columns(columns: Iterable[str], path: pathlib.Path) -> None:
    if tuple(columns) != COLUMNS:
        raise ValueError(
            f"{str(path)!r} has other columns than the figures of a run. "
            f"Received: {', '.join(columns)[:200]!r}. Allowed: "
            f"{', '.join(COLUMNS)}. Pass another path."
        )


def _rows(path: pathlib.Path) -> Iterator[Row]:
    is_csv = path.suffix == ".csv"
    try:
        with path.open(encoding="utf-8", newline="") as file:
            for number, row in _parsed(file, path) if is_csv else _json(file):
                yield _checked(row, f"line {number} of {str(path)!r}")
    except (UnicodeDecodeError, csv.Error) as error:
        raise ValueError(f"{str(path)!r} is no text: {error}") from error


def _json(file: TextIO) -> Iterator[tuple[int, Any]]:
    for number, line in enumerate(file, 1):
        try:
            yield number, json.loads(line)
        except (ValueError, RecursionError):
            if not line.endswith("\n"):
                return  # The run ended while it was written.
            yield number, line.strip()


def _parsed(file: TextIO, path: pathlib.Path) -> Iterator[tuple[int, Any]]:
    _check_columns(next(csv.reader([file.readline()]), []), path)
    for number, line in enumerate(file, 2):
        if not line.endswith("\n"):
            return
        cells = next(csv.reader([line]), [])
        row: Any = dict(zip(COLUMNS, cells, strict=False))
        for name in ("step", *FIGURES, "uses"):
            text = row.get(name, "?")
            row[name] = _number(text) if text else None
        yield number, row


def _number(text: str) -> Any:
    try:
        return float(text)
    except ValueError:
        return text


def _checked(row: Any, where: str) -> Row:
    """Return a row; raise if a key is missing or a value of another type."""
    if isinstance(row, dict) and set(COLUMNS) <= set(row):
        numbers = [row["step"], row["uses"]]
        numbers += [x for x in map(row.get, FIGURES) if x is not None]
        texts = [row[name] for name in (*KEYS, "note")]
        if all(map(_is_number, numbers)) and all(
            isinstance(text, str) for text in texts
        ):
            return row
    raise ValueError(
        f"{where} has not the figures of a run. Received: {str(row)[:200]}. "
        f"Allowed: {', '.join(COLUMNS)}, as keras_policy_ext.watch writes "
        "them by `path=`. Remove the line."
    )


def _is_number(x: Any) -> bool:
    is_real = isinstance(x, (int, float)) and not isinstance(x, bool)
    return is_real and abs(x) <= _LARGEST


def _by_step(rows: Iterable[Row]) -> Iterator[tuple[int, list[Row]]]:
    step: int | None = None
    found: list[Row] = []
    for row in rows:
        if found and int(row["step"]) != step:
            yield step or 0, found
            found = []
        step = int(row["step"])
        found.append(row)
    if found:
        yield step or 0, found
