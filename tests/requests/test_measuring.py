"""Requests on tasks whose samples have no labels: several answers per sample, or a number; what is measured is the mean loss."""

import pytest
import torch
from safetensors.torch import load_file, save_file

import expunge
from expunge import requests
from expunge.cli import main
from expunge.errors import InputError
from expunge.report.request_audit import auditing
from expunge.requests.request import checked, fulfil
from expunge.requests.settings import Settings
from expunge.requests.undo import undo
from expunge.requests.verifying import verify
from tests.requests.small import MASK, request, write_task

SEVERAL = """
import torch
from torch import nn
from torch.utils.data import DataLoader
import expunge

class Table(torch.utils.data.Dataset):
    def __init__(self, samples, seed):
        self.x = torch.randn(samples, 6, generator=torch.Generator().manual_seed(seed))
        self.y = (self.x[:, :3] + self.x[:, 3:] > 0).float()
    def __len__(self):
        return len(self.x)
    def __getitem__(self, row):
        return {"name": f"row {row}", "features": self.x[row].tolist(), "answers": self.y[row].tolist()}

def collate(samples):
    return {key: torch.tensor([sample[key] for sample in samples]) for key in ("features", "answers")}

def model():
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3))

def train():
    return DataLoader(Table(120, 1), batch_size=16, shuffle=True, collate_fn=collate)

def test():
    return DataLoader(Table(40, 2), batch_size=16, collate_fn=collate)

def losses(logits, answers):
    return nn.functional.binary_cross_entropy_with_logits(logits, answers, reduction="none").sum(1)

def objective():
    return expunge.Objective(lambda model, batch: model(batch["features"]), lambda batch: batch["answers"], losses, classes=False)
"""
NUMBER = (
    SEVERAL.replace("self.x[:, :3] + self.x[:, 3:] > 0).float()", "self.x.sum(1, keepdim=True))")
    .replace("nn.Linear(16, 3)", "nn.Linear(16, 1)")
    .replace("nn.functional.binary_cross_entropy_with_logits", "nn.functional.mse_loss")
)


@pytest.fixture(params=[SEVERAL, NUMBER], ids=["several answers", "a number"])
def folder(request, tmp_path):
    write_task(tmp_path, request.param)
    task = requests.load_task(tmp_path / "mytask.py")
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        expunge.train(task.model, task.train, expunge.Tuning(expunge.Constant(0.05, epochs=3)), task.objective, progress=False)
    save_file(task.model.state_dict(), tmp_path / "model.safetensors")
    return tmp_path


@pytest.mark.parametrize("settings", [MASK, Settings("finetune", threads=1)], ids=lambda settings: settings.method)
def test_a_request_without_labels_is_measured_by_its_losses(folder, settings):
    lines = []
    fulfil(request(folder, "0-29", settings=settings), lines.append, examine=auditing())
    receipt = fulfil(request(folder, "40-49", settings=settings), lines.append, examine=auditing())
    task = requests.load_task(folder / "mytask.py")

    def loss(weights, rows):
        task.model.load_state_dict(load_file(folder / weights))
        samples = [task.dataset[row] for row in rows]
        batch = {key: torch.tensor([sample[key] for sample in samples]) for key in ("features", "answers")}
        with torch.no_grad():
            return float(task.objective.losses(task.model(batch["features"]).double(), batch["answers"].double()).mean())

    measured, rows = receipt.measured["mean_losses"], [*range(30), *range(40, 50)]
    assert measured["forget"]["before"] == pytest.approx(loss("model.safetensors", rows), rel=1e-5)
    assert measured["forget"]["after"] == pytest.approx(loss("out/weights.safetensors", rows), rel=1e-5)
    assert measured["test"].keys() == {"before", "after"} and receipt.measured["accuracies"][0]["accuracies"] == {}
    assert any(line.startswith("mean loss: forget ") for line in lines)
    assert any(line.startswith("no audit was made: objective: an audit needs ") for line in lines)
    assert all(finding.fits for finding in verify(folder / "out" / "receipt.json", task=folder / "mytask.py"))
    undo(folder / "out", folder / "back.safetensors")
    back, before = load_file(folder / "back.safetensors"), load_file(folder / "model.safetensors")
    assert all(torch.equal(back[name], value) for name, value in before.items())


def test_to_choose_a_method_labels_are_needed(folder):
    for carry_out in (fulfil, checked):
        with pytest.raises(InputError, match="method: must be named, such as fisher-mask: to choose one needs class logits and labels"):
            carry_out(request(folder, settings=Settings()))
    assert not (folder / "out").exists()


def test_a_dry_run_says_that_there_will_be_no_audit(folder, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    given = ("--task", "mytask.py", "--weights", "model.safetensors", "--forget", "0-29", "--out", "new", "--method", "finetune")
    assert main(["unlearn", *given, "--dry-run"]) == 0
    assert "audit: none can be made, it needs class logits and labels\n" in capsys.readouterr().out


def test_with_labels_there_are_accuracies_and_no_losses(tmp_path):
    receipt = fulfil(request(tmp_path))
    assert "mean_losses" not in receipt.measured and receipt.measured["accuracies"][0]["accuracies"].keys() == {"forget", "test"}
