"""Task files: what they must have, and one clear line for each that does not."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader

from expunge.errors import InputError
from expunge.requests.request import fulfil
from expunge.requests.task import load_task
from tests.requests.small import TASK, request, write_task


def test_a_task_has_a_model_data_and_settings(tmp_path):
    task = load_task(write_task(tmp_path))
    assert len(task.train) == task.rows.samples == 120 and len(task.test) == 40
    assert task.model is task.model and task.recipe.batch_size == 32 and task.validation is not None
    assert task.objective.of_classes


def test_what_is_optional_may_be_missing(tmp_path):
    text = TASK.replace("def validation", "def other").replace("def recipe", "def unused")
    task = load_task(write_task(tmp_path, text))
    assert task.validation is None and task.recipe is None


def test_files_beside_a_task_can_be_imported(tmp_path):
    (tmp_path / "beside_the_task.py").write_text("SAMPLES = 50")
    task = load_task(
        write_task(tmp_path, TASK.replace("points(120, 1)", "points(beside_the_task.SAMPLES, 1)") + "\nimport beside_the_task\n")
    )
    assert task.rows.samples == 50


def test_a_file_that_was_changed_is_run_again(tmp_path):
    assert load_task(write_task(tmp_path)).rows.samples == 120
    assert load_task(write_task(tmp_path, TASK.replace("120", "60"))).rows.samples == 60


def test_a_loader_keeps_its_collator_and_rows(tmp_path):
    text = TASK + "\nfrom torch.utils.data import DataLoader, default_collate\n"
    text += "def collate(samples):\n    x, y = default_collate(samples)\n    return {'input': x, 'labels': y}\n"
    text = text.replace("return points(120, 1)", "return DataLoader(points(120, 1), 16, shuffle=True, collate_fn=collate)")
    task = load_task(write_task(tmp_path, text))
    part = task.rows.at(torch.tensor([3, 5]), True)
    assert isinstance(part, DataLoader) and task.rows.samples == 120
    assert next(iter(part))["labels"].tolist() == [3, 1]


@pytest.mark.parametrize(
    "text, told",
    [
        (TASK.replace("def train", "def training"), "there is no train(); found the functions points, model, training"),
        ("import nothing_of_this_name", "must not raise; found ModuleNotFoundError"),
        ("1 / 0", "must not raise; found ZeroDivisionError: division by zero ("),
        ("def model(:", "must not raise; found SyntaxError"),
        ("raise SystemExit(3)", "must not raise; found SystemExit: 3"),
        (TASK.replace("def test()", "def test(size)"), "test() of"),
        (TASK.replace("def model", "def build") + "\nmodel = nn.Linear(6, 4)", "model of"),
    ],
)
def test_a_file_that_fails_is_told_on_one_line(text, told, tmp_path):
    with pytest.raises(InputError) as caught:
        load_task(write_task(tmp_path, text))
    line = str(caught.value)
    assert line.startswith("task: ") and told in line and "\n" not in line and "mytask.py" in line


@pytest.mark.parametrize(
    "before, after, asked, told",
    [
        ("return nn.Sequential", "return nn.Sequential, ", "model", "model() of"),
        ("return nn.Sequential", "with torch.device('meta'): return nn.Sequential", "model", "0.weight on the meta device"),
        ("nn.Linear(6, 16)", "nn.LazyLinear(16)", "model", "0.weight without a shape (lazy)"),
        ("points(120, 1)", "iter(points(120, 1))", "train", "must return a dataset"),
        ("points(120, 1)", "'data'", "train", "must return a dataset"),
        ("points(120, 1)", "[]", "train", "with a length of at least 1"),
        ("points(120, 1)", "points(120, 1)[0][0].missing", "train", "'Tensor' object has no attribute 'missing' ("),
        ("points(120, 1)", "[points(120, 1)[:4]]", "rows", "or a loader that reads every row of one once"),
        ("points(120, 1)", "torch.utils.data.DataLoader(points(121, 1), 8, drop_last=True)", "rows", "reads every row of one once"),
        ("return expunge.Tuning(", "return dict(a=", "recipe", "recipe() of"),
    ],
)
def test_functions_that_return_something_else_are_named(before, after, asked, told, tmp_path):
    text = (
        TASK.replace(before, after).replace("epochs=2), batch_size=32)", "epochs=2))") if asked == "recipe" else TASK.replace(before, after)
    )
    task = load_task(write_task(tmp_path, text))
    with pytest.raises(InputError) as caught:
        getattr(task, asked)
    assert str(caught.value).startswith("task: ") and told in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("path", ["nothing.py", "folder", "notes.txt"])
def test_a_task_must_be_a_python_file(path, tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "notes.txt").write_text("model")
    missing = "; there is no such file" if path == "nothing.py" else ""
    with pytest.raises(InputError, match=f"must be a Python file{missing}; found .*{path}$"):
        load_task(tmp_path / path)


@pytest.mark.parametrize("where", ["imported", "called"])
def test_a_task_that_leaves_the_working_directory_is_refused(where, tmp_path, monkeypatch):
    """A relative `out` would be another folder: the earlier requests in it were not seen, and replaced."""
    fulfil(request(tmp_path, "0-9"))
    goes, line = f"import os\nos.chdir({str(tmp_path.parent)!r})\n", "return points(120, 1)"
    write_task(tmp_path, goes + TASK if where == "imported" else TASK.replace(line, goes.replace("\n", "\n    ") + line))
    monkeypatch.chdir(tmp_path)
    asked = replace(request(tmp_path, "11"), out="out")
    with pytest.raises(InputError, match=r"must stay in the working directory, .* found it went to "):
        fulfil(asked)
    assert Path.cwd() == tmp_path
    write_task(tmp_path)
    assert fulfil(asked).number == 2
