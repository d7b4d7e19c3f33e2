"""Keep what later deletion requests need, at the end of a training by Hugging Face's Trainer."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

import numpy
from torch import nn

from expunge.data.batches import device_of
from expunge.data.digest import data_digest
from expunge.errors import InputError, MismatchError
from expunge.requests.grouping import group_rows
from expunge.requests.recipes import RECIPE, Recipe, read_optimizer
from expunge.requests.summing import Summing
from expunge.requests.sums_building import build
from expunge.requests.task import Task, load_task
from expunge.requests.weights import frozen_digest, load_weights, save_weights, shared_names, weights_of
from expunge.runtime import processes
from expunge.storage.codec import encode
from expunge.storage.files import check_folder, write_json
from expunge.storage.folders import RESULT, reserved, signature
from expunge.training.recorded import thinned

try:
    from transformers import TrainerCallback
except ImportError:  # the package is imported whole where there is torch alone
    TrainerCallback = object

COMMAND = "training"  # in result.json: what made the folder
WEIGHTS = "weights.safetensors"


class KeepForRequests(TrainerCallback):
    """Writes the final weights and the recipe of a training into a folder: all that `expunge unlearn` asks for beside the task file.

    `weights.safetensors` holds the model's state_dict, of adapters (peft) what is trained; `recipe.json` the optimizer, the rate at every
    step, epochs and batch size, which a task's recipe() returns as `recorded_recipe(folder)`. With `load_best_model_at_end` the weights are
    the best ones.

    With a `task` file its model() and train() are compared with the Trainer's before the training begins, and the weights that were written
    are loaded into that model. `sums` then names the folder of a store of Fisher sums of the kind `fisher`, which is built by a pass over
    train(), shared by the processes of the training.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        task: str | os.PathLike[str] | None = None,
        sums: str | os.PathLike[str] | None = None,
        fisher: Literal["empirical", "expected"] = "empirical",
        batch_size: int = 128,
    ) -> None:
        if sums is not None and task is None:
            raise InputError("sums", "needs the task file: a store is of the data that its train() returns", os.fspath(sums))
        self.folder, self.task, self.sums, self.fisher, self.batch_size = folder, task, sums, fisher, batch_size
        self._rates: dict[int, float] = {}

    def on_train_begin(self, args: Any, state: Any, control: Any, model: nn.Module, train_dataloader: Any = None, **others: Any) -> None:
        """Everything that would fail at the end fails here."""
        if args.fsdp or getattr(args, "deepspeed", None):
            raise InputError("folder", "needs weights that are whole in every process, not sharded by FSDP or DeepSpeed", "a sharded model")
        self._rates = {}
        if not state.is_world_process_zero:
            return
        with reserved("folder", self.folder, COMMAND):
            pass
        if self.task is not None:
            _check_task(load_task(self.task), model, train_dataloader)
        if self.sums is not None:
            check_folder("sums", self.sums)

    def on_step_begin(self, args: Any, state: Any, control: Any, optimizer: Any, **others: Any) -> None:
        self._rates[state.global_step] = max(float(group["lr"] or 0.0) for group in optimizer.param_groups)

    def on_train_end(self, args: Any, state: Any, control: Any, model: nn.Module, optimizer: Any, **others: Any) -> None:
        if state.is_world_process_zero:
            self._write(args, state, model, optimizer)
        if self.sums is not None and self.task is not None:
            processes.told_by_first("the weights are written")
            task = load_task(self.task)
            load_weights(Path(self.folder) / WEIGHTS, task.model)
            build(self.sums, Summing(task, task.model.to(device_of(model)), self.fisher, self.batch_size), group_rows(task))

    def _write(self, args: Any, state: Any, model: nn.Module, optimizer: Any) -> None:
        recipe = self._recipe(args, state, model, getattr(optimizer, "optimizer", optimizer))  # accelerate wraps it

        def write(new: Path) -> None:
            save_weights(new / WEIGHTS, weights_of(model, _kept_names(model)), shared_names(model))
            write_json(new / RECIPE, encode(recipe))
            write_json(new / RESULT, signature(COMMAND, [WEIGHTS, RECIPE]))

        with reserved("folder", self.folder, COMMAND) as place:
            place.save(write)
        if self.task is not None:
            task = load_task(self.task)
            load_weights(Path(self.folder) / WEIGHTS, task.model)

    def _recipe(self, args: Any, state: Any, model: nn.Module, optimizer: Any) -> Recipe:
        name, settings, groups = read_optimizer(optimizer, model)
        return Recipe(
            name,
            settings,
            groups,
            thinned(self._every_rate(state)),
            epochs=max(1, round(state.epoch)),
            batch_size=(state.train_batch_size or args.train_batch_size) * args.gradient_accumulation_steps * args.world_size,
            seed=args.seed,
            precision="bfloat16" if args.bf16 else "float32",
            clip=args.max_grad_norm if args.max_grad_norm else None,
            not_kept=tuple(_not_kept(args, optimizer)),
        )

    def _every_rate(self, state: Any) -> list[float]:
        """Of every step; of those before a resumed training what was logged after them, with straight lines between."""
        logged = {part["step"] - 1: part["learning_rate"] for part in state.log_history if "learning_rate" in part}
        known = {step: rate for step, rate in logged.items() if step < min(self._rates, default=0)} | self._rates
        steps = sorted(known)
        return numpy.interp(range(max(state.global_step, 1)), steps, [known[step] for step in steps]).tolist() if steps else [0.0]


def _check_task(task: Task, model: nn.Module, loader: Any) -> None:
    """The task's model and data must be those of the Trainer, as far as can be told before the training."""
    own, theirs = (
        {name: (tuple(value.shape), value.dtype) for name, value in network.state_dict().items()} for network in (model, task.model)
    )
    if strange := sorted(name for name in own.keys() | theirs.keys() if own.get(name) != theirs.get(name)):
        found = f"{strange[0]}: {theirs.get(strange[0], 'nothing')} there, {own.get(strange[0], 'nothing')} in the Trainer's"
        raise MismatchError(f"task: model() of {task.path} must return the model that is trained; found {found}")
    kept = set(_kept_names(model))
    if frozen_digest(model, kept) != frozen_digest(task.model, kept):
        raise MismatchError(f"task: model() of {task.path} must give what is frozen the values that it has in the training; found others")
    data = getattr(loader, "dataset", None)
    samples = getattr(data, "__len__", lambda: task.rows.samples)()
    if samples != task.rows.samples:
        raise MismatchError(f"task: train() of {task.path} must return the training data, {samples} samples; found {task.rows.samples}")
    digests = {data_digest(data), data_digest(task.train)}
    if None not in digests and len(digests) > 1:
        rule = f"task: train() of {task.path} must return the samples that are trained on, in their order"
        raise MismatchError(f"{rule}; found other `tensors` or `targets`")


def _kept_names(model: nn.Module) -> Iterable[str]:
    """All of the state_dict; of a model with adapters of peft not what is frozen, which the task's model() makes."""
    own = model.state_dict(keep_vars=True)
    if not hasattr(model, "peft_config"):
        return tuple(own)
    return tuple(name for name, value in own.items() if not isinstance(value, nn.Parameter) or value.requires_grad)


def _not_kept(args: Any, optimizer: Any) -> Iterable[str]:
    if args.fp16:
        yield "float16 with a scaled loss; here float32"
    if args.label_smoothing_factor:
        yield f"labels smoothed by {args.label_smoothing_factor:g}: give the task an objective() for it"
    if len({group.get("initial_lr", group["lr"]) for group in optimizer.param_groups}) > 1:
        yield "a rate of its own for each group; here the largest for all"
