"""A real Trainer with the callback, and requests served from what it wrote."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import Trainer, TrainingArguments, ViTConfig, ViTForImageClassification

import expunge
from expunge.cli import main
from expunge.data.objective import Objective
from expunge.errors import InputError, MismatchError
from expunge.integrations.trainer import KeepForRequests
from expunge.requests.prepared import Request
from expunge.requests.recipes import recorded_recipe
from expunge.requests.request import fulfil
from expunge.requests.settings import Settings
from expunge.requests.task import load_task
from expunge.requests.verifying import verify
from tests import processes

EXAMPLES = Path(__file__).parents[2] / "examples" / "requests"
RECIPE = "\ndef recipe():\n    return expunge.requests.recorded_recipe(__file__.rpartition('/')[0] + '/kept')\n"


def arguments(folder, **changes):
    settings = {"num_train_epochs": 2, "per_device_train_batch_size": 16, "learning_rate": 5e-3, "weight_decay": 0.01, "warmup_steps": 3}
    plain = {"report_to": "none", "save_strategy": "no", "use_cpu": True, "disable_tqdm": True, "logging_strategy": "no"}
    return TrainingArguments(output_dir=str(folder / "trainer"), **plain | settings | changes)


def task_in(folder, name="bert"):
    """An example's task file, which reads back its recipe; its own functions to train with."""
    (folder / "mytask.py").write_text((EXAMPLES / f"{name}.py").read_text().partition("\nif __name__")[0] + RECIPE)
    if name == "lora":
        shutil.copy(EXAMPLES / "bert.py", folder)
    return load_task(folder / "mytask.py")


def trained(folder, task, callback, model=None, **changes):
    torch.manual_seed(0)
    model = task.module.model() if model is None else model
    loader = task.module.train()
    data, collate = (loader.dataset, loader.collate_fn) if isinstance(loader, torch.utils.data.DataLoader) else (loader, None)
    trainer = Trainer(model, arguments(folder, **changes), data_collator=collate, train_dataset=data, callbacks=[callback])
    trainer.train()
    return trainer


def test_a_request_is_served_from_what_was_kept(tmp_path):
    task = task_in(tmp_path)
    trainer = trained(tmp_path, task, KeepForRequests(tmp_path / "kept", tmp_path / "mytask.py", tmp_path / "sums"))
    assert {path.name for path in (tmp_path / "kept").iterdir()} == {"weights.safetensors", "recipe.json", "result.json"}
    kept = load_file(tmp_path / "kept" / "weights.safetensors")
    assert all(torch.equal(value, kept[name]) for name, value in trainer.model.state_dict().items())
    tuning = recorded_recipe(tmp_path / "kept")
    assert (tuning.batch_size, tuning.schedule.epochs, tuning.seed) == (16, 2, 42)
    rise, fall = [5e-3 * step / 3 for step in range(3)], [5e-3 * (20 - step) / 17 for step in range(3, 20)]  # 10 steps per epoch
    assert [tuning.schedule.rate(step / 10) for step in range(20)] == pytest.approx([*rise, *fall])
    for forget, out, settings, sums in (
        ("0-9", "tuned", Settings("finetune", threads=1), None),
        ("label=1", "masked", Settings("fisher-mask", ("tuning=None",)), tmp_path / "sums"),
    ):
        asked = Request(
            tmp_path / "mytask.py", tmp_path / "kept" / "weights.safetensors", forget, tmp_path / out, settings=settings, sums=sums
        )
        receipt = fulfil(asked)
        assert receipt.weights_after != receipt.weights_before
    settings = json.loads((tmp_path / "tuned" / "settings.json").read_bytes())
    assert "Replay(schedule=Recorded(20 rates up to 0.005 (" in settings["built"]["repr"] and "Rebuilt(AdamW, " in settings["used"]
    assert all(finding.fits for finding in verify(tmp_path / "tuned" / "receipt.json", task=tmp_path / "mytask.py"))


class Rows(torch.utils.data.Dataset):
    def __init__(self, pixels, labels):
        self.pixels, self.targets = pixels, labels

    def __len__(self):
        return len(self.targets)

    def __getitem__(self, row):
        return {"pixel_values": self.pixels[row], "labels": self.targets[row]}


@pytest.mark.parametrize("changes", [{}, {"optim": "sgd", "learning_rate": 0.1}, {"max_grad_norm": 0.02, "lr_scheduler_type": "cosine"}])
def test_the_recipe_trains_as_the_trainer_did(changes, tmp_path):
    """All samples in one batch and no dropout: neither order nor draws matter, so the weights are the same up to rounding."""
    generator = torch.Generator().manual_seed(0)
    data = Rows(torch.randn(24, 1, 8, 8, generator=generator), torch.arange(24) % 4)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    none = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    torch.manual_seed(0)
    model = ViTForImageClassification(ViTConfig(image_size=8, patch_size=4, num_channels=1, num_labels=4, **sizes, **none))
    again = ViTForImageClassification(model.config)
    again.load_state_dict(model.state_dict())
    settings = {"per_device_train_batch_size": 24, "num_train_epochs": 12, "weight_decay": 0.3, **changes}
    Trainer(model, arguments(tmp_path, **settings), train_dataset=data, callbacks=[KeepForRequests(tmp_path / "kept")]).train()
    before = nn.utils.parameters_to_vector(again.parameters()).clone()
    expunge.train(again, data, recorded_recipe(tmp_path / "kept"), Objective(), progress=False)
    ours, theirs = (nn.utils.parameters_to_vector(network.parameters()) for network in (again, model))
    assert (ours - theirs).norm() < 1e-4 * (theirs - before).norm()


def test_the_best_weights_are_kept_where_the_trainer_loads_them(tmp_path):
    task = task_in(tmp_path)
    better = iter([0.1, 0.9, 0.3])
    best = {"load_best_model_at_end": True, "metric_for_best_model": "accuracy", "eval_strategy": "epoch", "save_strategy": "epoch"}
    torch.manual_seed(0)
    trainer = Trainer(
        task.module.model(),
        arguments(tmp_path, num_train_epochs=3, **best),
        data_collator=task.module.padded,
        train_dataset=task.dataset,
        eval_dataset=task.test.dataset,
        compute_metrics=lambda _: {"accuracy": next(better)},
        callbacks=[KeepForRequests(tmp_path / "kept")],
    )
    trainer.train()
    second = load_file(tmp_path / "trainer" / "checkpoint-20" / "model.safetensors")
    kept = load_file(tmp_path / "kept" / "weights.safetensors")
    assert all(torch.equal(value, kept[name]) for name, value in second.items())
    assert recorded_recipe(tmp_path / "kept").schedule.epochs == 3


def test_a_training_that_was_resumed_has_all_its_rates(tmp_path):
    task = task_in(tmp_path)
    logged = {"num_train_epochs": 2, "save_strategy": "epoch", "logging_strategy": "steps", "logging_steps": 1}
    trained(tmp_path, task, KeepForRequests(tmp_path / "whole"), **logged)
    callback = KeepForRequests(tmp_path / "resumed")
    trainer = Trainer(
        task.module.model(),
        arguments(tmp_path, **logged),
        data_collator=task.module.padded,
        train_dataset=task.dataset,
        callbacks=[callback],
    )
    trainer.train(resume_from_checkpoint=str(tmp_path / "trainer" / "checkpoint-10"))
    whole, resumed = (recorded_recipe(tmp_path / name).schedule.rates for name in ("whole", "resumed"))
    assert len(resumed) == 20 and resumed == pytest.approx(whole)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # peft's own
def test_of_adapters_what_is_trained_is_kept(tmp_path):
    task = task_in(tmp_path, "lora")
    model = task.module.model()
    trained(tmp_path, task, KeepForRequests(tmp_path / "kept", tmp_path / "mytask.py"), model)
    kept = load_file(tmp_path / "kept" / "weights.safetensors")
    assert {*kept} == {name for name, parameter in model.named_parameters() if parameter.requires_grad} < {*model.state_dict()}
    text = (tmp_path / "mytask.py").read_text()
    (tmp_path / "mytask.py").write_text(text.replace("manual_seed(7)", "manual_seed(8)"))
    with pytest.raises(MismatchError, match=r"task: model\(\) of .* must give what is frozen the values that it has in the training"):
        trained(tmp_path, task, KeepForRequests(tmp_path / "other", tmp_path / "mytask.py"), model)
    (tmp_path / "mytask.py").write_text(text)
    asked = Request(tmp_path / "mytask.py", tmp_path / "kept" / "weights.safetensors", "label=1", tmp_path / "out")
    receipt = fulfil(Request(**vars(asked) | {"settings": Settings("finetune", threads=1)}))
    assert receipt.sources.keys() == {"bert.py"} and receipt.weights_after != receipt.weights_before


def test_a_task_that_does_not_fit_is_told_before_the_training(tmp_path):
    task, path = task_in(tmp_path), tmp_path / "mytask.py"
    text = path.read_text()
    for before, after, told in (
        ('"hidden_size": 16', '"hidden_size": 32', r"task: model\(\) of .*mytask.py must return the model that is trained; found "),
        ("loader(150, 0, shuffle=True)", "loader(149, 0)", r"task: train\(\) of .* must return the training data, 150 samples; found 149"),
        (
            "arange(samples) %",
            "arange(samples).flip(0) %",
            r"task: train\(\) of .* must return the samples that are trained on, in their order",
        ),
    ):
        path.write_text(text.replace(before, after))
        torch.manual_seed(0)
        model = task.module.model()
        first = nn.utils.parameters_to_vector(model.parameters()).clone()
        with pytest.raises(MismatchError, match=told):
            trained(tmp_path, task, KeepForRequests(tmp_path / "kept", path), model)
        assert torch.equal(first, nn.utils.parameters_to_vector(model.parameters())) and not (tmp_path / "kept").exists()


def test_where_nothing_could_be_kept_nothing_is_trained(tmp_path):
    task = task_in(tmp_path)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.txt").write_text("dear")
    for callback, told in (
        (lambda: KeepForRequests(tmp_path / "full"), "folder: must be a folder that is new, empty"),
        (lambda: KeepForRequests(tmp_path / "mytask.py" / "kept"), "folder: must be a folder, and "),
        (lambda: KeepForRequests(tmp_path / "kept", sums=tmp_path / "sums"), "sums: needs the task file"),
    ):
        with pytest.raises(InputError, match=told):
            trained(tmp_path, task, callback())
    assert not (tmp_path / "kept").exists() and [path.name for path in (tmp_path / "full").iterdir()] == ["thesis.txt"]


def test_an_optimizer_that_torch_does_not_have_is_given(tmp_path):
    trained(tmp_path, task_in(tmp_path, "vit"), KeepForRequests(tmp_path / "kept"), optim="adafactor", label_smoothing_factor=0.1)
    with pytest.raises(
        InputError, match="optimizer: must be one of torch.optim to be built again; .*found transformers.optimization.Adafactor"
    ):
        recorded_recipe(tmp_path / "kept")
    assert recorded_recipe(tmp_path / "kept", torch.optim.Adam).optimizer is torch.optim.Adam
    assert any("labels smoothed by 0.1" in line for line in json.loads((tmp_path / "kept" / "recipe.json").read_bytes())["not_kept"])


TOGETHER = """
from pathlib import Path
from expunge.integrations.trainer import KeepForRequests
from tests.integrations.test_trainer import task_in, trained
from expunge.requests.task import load_task

folder = Path(".").resolve()
trained(folder, load_task(folder / "mytask.py"), KeepForRequests(folder / "kept", folder / "mytask.py", folder / "sums"))
"""


@pytest.mark.slow
def test_the_processes_of_a_training_build_the_store_together(tmp_path, monkeypatch):
    task_in(tmp_path)
    processes.printed(processes.start(TOGETHER, tmp_path, 2))
    monkeypatch.chdir(tmp_path)
    given = ("--task", "mytask.py", "--weights", "kept/weights.safetensors", "--quiet")
    assert main(["fisher", "build", *given, "--out", "one"]) == 0
    one, together = ({path.name: path.read_bytes() for path in (tmp_path / name).iterdir()} for name in ("one", "sums"))
    assert one == together and "total.0.safetensors" in one
