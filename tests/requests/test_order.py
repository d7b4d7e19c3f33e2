"""A sample's id is its row: a train() that returns another order is refused where it can be seen, and made stable where it can be."""

import pytest

from expunge.cli import main
from expunge.data.row_digests import row_digest
from expunge.errors import InputError, MismatchError
from expunge.requests import task as tasks
from expunge.requests.request import checked, fulfil
from expunge.requests.task import load_task
from expunge.requests.verifying import verify
from tests.requests.small import TASK, request, write_task

FILES = """
import os, random

class Listed(torch.utils.data.Dataset):
    def __init__(self, data):
        self.data, self.order = data, list(range(len(data)))
        DRAWN

    def __len__(self):
        return len(self.order)

    def __getitem__(self, row):
        return self.data[self.order[row]]

def train():
    return Listed(points(120, 1))
"""


def write_drawn(folder, how):
    """A task whose samples show no tensors, in an order that is drawn when train() is called."""
    request(folder)
    write_task(folder, TASK + FILES.replace("DRAWN", how))
    return request(folder)


@pytest.mark.parametrize(
    "how", ["random.Random().shuffle(self.order)", "import numpy; numpy.random.default_rng().shuffle(self.order)"], ids=["random", "numpy"]
)
def test_another_order_in_every_call_is_refused_at_the_first_request(how, tmp_path):
    asked = write_drawn(tmp_path, how)
    for carry_out in (fulfil, checked):
        with pytest.raises(
            InputError, match=r"train\(\) of .* must return the same samples in the same order each time, since a sample's id"
        ):
            carry_out(asked)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "how",
    [
        "random.shuffle(self.order)",
        "import numpy; numpy.random.shuffle(self.order)",
        "self.order = torch.randperm(len(data)).tolist()",
    ],
    ids=["random", "numpy", "torch"],
)
def test_what_is_drawn_from_the_generators_that_everybody_shares_is_the_same_in_every_call(how, tmp_path):
    import random

    import torch

    asked = write_drawn(tmp_path, how)
    fulfil(asked)
    for seed in (5, 6):  # as another process would have it
        torch.manual_seed(seed)
        random.seed(seed)
        assert all(finding.fits for finding in verify(tmp_path / "out" / "receipt.json", task=tmp_path / "mytask.py"))


def test_another_order_at_a_later_request_is_refused(tmp_path, monkeypatch):
    """As of names in a set, which is another in every process, and which a second call in one process does not show."""
    asked = write_drawn(tmp_path, 'self.order.sort(key=lambda row: hash((os.environ.get("ORDER"), row)))')
    monkeypatch.setenv("ORDER", "one")
    fulfil(asked)
    monkeypatch.setenv("ORDER", "two")
    with pytest.raises(MismatchError, match=r"task: train\(\) must return the data of the requests in .*, in their order; found rows "):
        fulfil(request(tmp_path, "20"))
    lines = [finding.line for finding in verify(tmp_path / "out" / "receipt.json", task=tmp_path / "mytask.py") if not finding.fits]
    assert lines[0] == "train(): the data of the receipt, by 64 samples spread over them"


def test_samples_that_no_seed_makes_equal_are_told_by_their_targets(tmp_path, monkeypatch):
    noisy = "self.noise = random.Random()"
    request(tmp_path)
    text = (TASK + FILES.replace("DRAWN", noisy)).replace(
        "return self.data[self.order[row]]", "x, y = self.data[self.order[row]]; return x + self.noise.random(), y"
    )
    write_task(tmp_path, text)
    receipt = fulfil(request(tmp_path))
    assert receipt.data["train"].startswith("targets ")
    fulfil(request(tmp_path, "20"))
    write_task(tmp_path, text.replace("self.noise = ", "self.order.reverse(); self.noise = "))
    with pytest.raises(MismatchError, match="in their order; found targets "):
        fulfil(request(tmp_path, "30"))


def test_a_train_that_takes_long_is_called_once(tmp_path, monkeypatch):
    asked = write_drawn(tmp_path, "random.Random().shuffle(self.order)")
    monkeypatch.setattr(tasks, "QUICK", -1.0)
    assert checked(asked).rows == tuple(range(10))


@pytest.mark.parametrize("workers", [0, 1])
def test_a_sample_that_cannot_be_read_is_one_line(workers, tmp_path, monkeypatch, capsys):
    request(tmp_path)
    loader = f"torch.utils.data.DataLoader(Listed(points(120, 1)), batch_size=16, num_workers={workers})"
    text = TASK + FILES.replace("DRAWN", "pass").replace("return Listed(points(120, 1))", f"return {loader}")
    write_task(tmp_path, text.replace("return self.data[self.order[row]]", "return self.data[self.order[row]] if row != 41 else 1 / 0"))
    monkeypatch.chdir(tmp_path)
    given = ["--task", "mytask.py", "--weights", "model.safetensors", "--out", "new"]
    for command in (["unlearn", *given, "--forget", "0-9", "--quiet"], ["fisher", "build", *given]):
        assert main(command) == 2
        error = capsys.readouterr().err
        assert "task: what mytask.py returns must not raise when it is used; found ZeroDivisionError: division by zero (" in error, error
        assert len(error.splitlines()) == 1
    assert not (tmp_path / "new" / "receipt.json").exists()


def test_a_sample_that_ends_the_program_is_an_error(tmp_path, monkeypatch, capsys):
    """It was a success that had written nothing."""
    request(tmp_path)
    ends = "return self.data[self.order[row]] if row != 41 else sys.exit(0)"
    write_task(tmp_path, "import sys\n" + (TASK + FILES.replace("DRAWN", "pass")).replace("return self.data[self.order[row]]", ends))
    monkeypatch.chdir(tmp_path)
    assert main(["unlearn", "--task", "mytask.py", "--weights", "model.safetensors", "--out", "new", "--forget", "0-9", "--quiet"]) == 2
    assert "must not raise when it is used; found SystemExit: 0 (" in capsys.readouterr().err


PAIR = TASK.replace("return points(120, 1)", "return points(120, 1).tensors").replace(
    "return points(40, 2)", "return points(40, 2).tensors"
)


def test_data_given_as_x_and_y_are_compared_whole(tmp_path):
    """Row 1 is none of the 64 that are compared of data which show no tensors."""
    write_task(tmp_path, PAIR)
    receipt = fulfil(request(tmp_path))
    out, task = tmp_path / "out", tmp_path / "mytask.py"
    assert all(finding.fits and finding.compared for finding in verify(out / "receipt.json", task=task))
    other = "    x, y = points(120, 1).tensors\n    x[1] += 1\n    return x, y"
    write_task(tmp_path, PAIR.replace("    return points(120, 1).tensors", other).replace("points(40, 2)", "points(40, 3)"))
    with pytest.raises(MismatchError, match=r"train\(\) must return the data of the requests"):
        fulfil(request(tmp_path, "50"))
    wrong = [finding.line for finding in verify(out / "receipt.json", task=task) if not finding.fits]
    assert {"train(): the data of the receipt", "test(): the data of the receipt"} <= {*wrong}
    assert load_task(write_task(tmp_path, PAIR)).is_data(receipt.data["train"])


def test_receipts_of_x_and_y_by_some_samples_are_still_of_these_data(tmp_path):
    task = load_task(write_task(tmp_path, PAIR))
    before = row_digest(task.rows, task.objective.targets, "train")
    assert before != task.data and task.is_data(before) and not task.is_data(before[:-1]) and not task.is_data(None)
