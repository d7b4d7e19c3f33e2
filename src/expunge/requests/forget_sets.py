"""Read which samples to forget: ids from a file, ranges, a label, a predicate of the task, a boolean mask."""

from __future__ import annotations

import csv
import io
import os
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy
import torch
from torch import Tensor

from expunge.data.batches import as_batches
from expunge.errors import InputError, naming
from expunge.requests.task import BATCH_SIZE, Task, plain_key
from expunge.storage.documents import excerpt, read_plain
from expunge.validate import shown

ARGUMENT = "forget"
RANGES = re.compile(r"\d+(-\d+)?(,\d+(-\d+)?)*")
THOUSANDS = re.compile(r"\d{1,3}(,\d{3})+", re.ASCII)  # 12,345 is one number to many programs that write files
SPACED = re.compile(r" *([,-]) *")
FORMS = "0-99,200 or label=3 or key=NAME or keys=FILE or predicate=NAME or a file of ids (text, .csv, .npy)"
LARGEST = 2**28  # bytes of a file of ids
DIGITS = 18  # of an id


def forget_rows(spec: str, task: Task, column: str | None = None) -> tuple[int, ...]:
    """The rows of the training data to forget, in rising order: some, each once, and not all of them.

    0-99,200          rows and ranges, both ends included
    label=3 or 3,5    all samples with one of these labels
    key=NAME          all samples that the task's keys() gives this key, or one of several, with commas between
    keys=FILE         the same for the keys in a file: one per line, or a column of a .csv
    predicate=NAME    samples for which a function of the task file is true
    ids.txt           a row or a range per line; what follows # is skipped
    ids.csv           the column `column`, else "id", else the only one
    ids.npy           whole numbers, or a boolean mask with an entry per sample, as cleanlab returns it
    """
    rows = _rows(spec, task, column)
    samples = task.rows.samples
    if not rows:
        raise InputError(ARGUMENT, "must name at least one sample; nothing is to be forgotten", spec)
    if repeated := [row for row, times in Counter(rows).items() if times > 1]:
        raise InputError(ARGUMENT, "must name every sample once", f"{_listed(repeated)} more than once")
    if outside := [row for row in rows if not 0 <= row < samples]:
        raise InputError(ARGUMENT, f"ids must be rows of the training data, 0 to {samples - 1}", _listed(outside))
    if len(rows) == samples:
        raise InputError(ARGUMENT, "must leave samples to keep; where all are to be forgotten, delete the model", f"all {samples}")
    return tuple(sorted(rows))


def labels_of(task: Task) -> Tensor | None:
    """The label of every training sample; None where targets are not one whole number each."""
    parts: list[Tensor] = []
    with naming("train"):
        for batch in as_batches(task.rows.at(torch.arange(task.rows.samples), True), "train", BATCH_SIZE):
            targets = task.objective.targets(batch)
            if not isinstance(targets, Tensor) or targets.dim() != 1 or targets.is_floating_point() or targets.dtype == torch.bool:
                return None
            parts.append(targets.detach().cpu().long())
    return torch.cat(parts)


def _rows(spec: str, task: Task, column: str | None) -> Sequence[int]:
    if not isinstance(spec, str):
        raise InputError(ARGUMENT, f"must be a text: {FORMS}", shown(spec))
    kind, _, value = spec.partition("=")
    if column is not None and not spec.lower().endswith(".csv"):
        raise InputError("column", "is for a .csv file of ids", column)
    if not spec.strip():
        raise InputError(ARGUMENT, f"must be {FORMS}", "an empty text")
    if kind == "label" and not os.path.exists(spec):
        return _labelled(value, task)
    if kind == "predicate" and not os.path.exists(spec):
        return _chosen(value, task)
    if kind in ("key", "keys") and not os.path.exists(spec):
        return _of_keys(value.split(",") if kind == "key" else _read_keys(value, column), task)
    if RANGES.fullmatch(_compact(spec)):
        return _ranges(_compact(spec), spec, task.rows.samples)
    path = Path(spec)
    if not path.exists():
        raise InputError(ARGUMENT, f"must be {FORMS}; there is no such file", spec)
    try:
        content = read_plain(path, LARGEST)
        if path.suffix.lower() == ".npy":
            return _array(content, spec, task.rows.samples)
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(ARGUMENT, "a file of ids must be text in UTF-8, .csv or .npy", spec) from error
    except ValueError as error:
        if isinstance(error, InputError):
            raise
        raise InputError(ARGUMENT, f"must be a file of ids ({excerpt(error)})", spec) from error
    is_table = path.suffix.lower() == ".csv"
    lines = _column(text, column, spec) if is_table else [line.partition("#")[0].strip() for line in text.splitlines()]
    rows: list[int] = []
    for number, line in enumerate(lines, start=1):
        compact = _compact(line)
        # A cell holds one entry: "1,000" may be a thousand, and an empty one is a sample that nobody would forget.
        if (is_table and (not compact or "," in compact)) or (compact and not RANGES.fullmatch(compact)):
            raise InputError(ARGUMENT, f"{spec}, entry {number}: must be the id of a sample, a row of the training data", excerpt(line))
        if THOUSANDS.fullmatch(compact):
            raise InputError(ARGUMENT, f"{spec}, entry {number}: must be a number without commas, or several on a line each", excerpt(line))
        if compact:
            rows += _ranges(compact, f"{spec}, entry {number}", task.rows.samples)
    return rows


def _compact(text: str) -> str:
    """Without spaces around commas and dashes; those between two numbers stay: 5 6 is not 56."""
    return SPACED.sub(r"\1", text).strip()


def _ranges(text: str, shown: str, samples: int) -> list[int]:
    rows: list[int] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        if max(len(first), len(last)) > DIGITS:
            raise InputError(ARGUMENT, f"ids must be rows of the training data, 0 to {samples - 1}", excerpt(part, 40))
        low, high = int(first), int(last or first)
        if high < low:
            raise InputError(ARGUMENT, f"{shown}: a range must rise", part)
        if high >= samples:  # before a list of its length is made
            raise InputError(ARGUMENT, f"ids must be rows of the training data, 0 to {samples - 1}", high)
        rows += range(low, high + 1)
    return rows


def _labelled(text: str, task: Task) -> list[int]:
    if not re.fullmatch(r"-?\d{1,18}(,-?\d{1,18})*", text):
        raise InputError(ARGUMENT, "label= must be followed by whole numbers, such as label=3 or label=3,5", excerpt(text or "nothing"))
    labels, wanted = labels_of(task), [int(part) for part in text.split(",")]
    if labels is None:
        raise InputError(ARGUMENT, "label= needs training data with one whole number per sample as target; give ids", f"label={text}")
    known = _listed(labels.unique().tolist())
    if absent := [label for label in wanted if not bool((labels == label).any())]:
        raise InputError(ARGUMENT, f"label= must be a label of the training data ({known})", _listed(absent))
    return torch.isin(labels, torch.tensor(wanted)).nonzero().flatten().tolist()


def _chosen(name: str, task: Task) -> list[int]:
    predicate, dataset, rows = task.predicate(name), task.dataset, []
    for row in range(task.rows.samples):
        try:
            answer = bool(predicate(dataset[row]))
        except Exception as error:  # of a user's function
            line = " ".join(f"{type(error).__name__}: {error}".split())
            raise InputError(ARGUMENT, f"predicate={name} must not raise", f"{line}, at sample {row}") from error
        if answer:
            rows.append(row)
    return rows


def _of_keys(wanted: Sequence[str], task: Task) -> list[int]:
    asked = Counter(map(plain_key, wanted))
    if not all(asked):
        raise InputError(ARGUMENT, "key= must be followed by keys of the training data, such as key=4711", "an empty one")
    if repeated := [key for key, times in asked.items() if times > 1]:
        raise InputError(ARGUMENT, "must name every key once", f"{excerpt(repeated[0], 40)} more than once")
    if absent := sorted(asked.keys() - {*task.keys}):
        more = f" and {len(absent) - 1} more" if len(absent) > 1 else ""
        raise InputError(ARGUMENT, "must be keys that the task's keys() returns", f"{excerpt(absent[0], 40)}{more}")
    return [row for row, key in enumerate(task.keys) if key in asked]


def _read_keys(file: str, column: str | None) -> list[str]:
    if not Path(file).is_file():
        raise InputError(ARGUMENT, "keys= must be a file of keys; there is no such file", file)
    try:
        text = read_plain(file, LARGEST).decode("utf-8-sig")
    except ValueError as error:  # bytes that are no text, too
        raise InputError(ARGUMENT, f"must be a file of keys, text in UTF-8 or .csv ({excerpt(error)})", file) from error
    if file.lower().endswith(".csv"):
        return _column(text, column, file)
    return [line.strip() for line in text.splitlines() if line.strip()]


def _array(content: bytes, spec: str, samples: int) -> list[int]:
    try:
        array = numpy.load(io.BytesIO(content), allow_pickle=False)
    except Exception as error:  # a header that lies can fail in any way: as Python's own syntax, or by a size that no memory has
        raise InputError(ARGUMENT, f"must be a .npy file of numbers, no pickle ({excerpt(error)})", spec) from error
    if not isinstance(array, numpy.ndarray) or array.ndim != 1 or array.dtype.kind not in "biu":
        found = f"{array.dtype} of shape {array.shape}" if isinstance(array, numpy.ndarray) else type(array).__name__
        raise InputError(ARGUMENT, "a .npy file must hold whole numbers or a boolean mask, in one dimension", f"{found} in {spec}")
    if array.dtype.kind == "b":
        if len(array) != samples:
            rule = f"a mask must have an entry per training sample, {samples}"
            raise InputError(ARGUMENT, rule, f"a mask of {len(array)} in {spec}")
        return numpy.flatnonzero(array).tolist()
    return array.tolist()


def _column(text: str, column: str | None, spec: str) -> list[str]:
    try:
        lines = [line for line in csv.reader(io.StringIO(text, newline=""), strict=True) if line]
    except csv.Error as error:
        raise InputError(ARGUMENT, f"must be a CSV file ({excerpt(error)})", spec) from error
    if not lines:
        return []
    head, *body = lines
    names = [name.strip() for name in head]
    if long := next((number for number, line in enumerate(body, start=2) if any(cell.strip() for cell in line[len(names) :])), None):
        found = excerpt(", ".join(body[long - 2]))  # "1,000" without quotes is two cells
        raise InputError(ARGUMENT, f"{spec}, line {long}: must have no more cells than the first line, {len(names)}", found)
    if column is None:
        if "id" in names:
            column = "id"
        elif len(names) == 1:
            if RANGES.fullmatch(names[0]):
                return [names[0], *(line[0] for line in body)]
            column = names[0]
        else:
            raise InputError("column", f"must name the column of {spec} that holds the ids", f"the columns {', '.join(names)}")
    if names.count(column) != 1:
        raise InputError("column", f"must be one column of {spec}, which has {excerpt(', '.join(names))}", column)
    place = names.index(column)
    if short := next((number for number, line in enumerate(body, start=2) if len(line) <= place), None):
        raise InputError(ARGUMENT, f"{spec}, line {short}: must have a column {column}")
    return [line[place].strip() for line in body]


def _listed(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers[:5])) + (f" and {len(numbers) - 5} more" if len(numbers) > 5 else "")
