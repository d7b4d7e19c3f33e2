"""Skip single-sample batches that BatchNorm cannot normalise."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from expunge.data.batches import batch_size, device_of, to_device
from expunge.data.objective import Batch, Objective
from expunge.errors import InputError
from expunge.runtime.modes import eager, in_mode, seeded
from expunge.runtime.nested import tensors

RULE = "BatchNorm needs two samples or more in some batch; give larger batches, or train with Tuning(eval_mode=True)"


class SingleSampleFilter:
    """Tells which batches a model can be trained with, in the modes its modules have at the first call."""

    def __init__(self, model: nn.Module, objective: Objective) -> None:
        self.model, self.objective = model, objective
        self._norms: list[nn.Module] | None = None
        self._refused: dict[tuple[torch.Size, ...], bool] = {}

    def kept(self, batches: Iterable[Any], argument: str, samples: Callable[[Any], Batch] = lambda batch: batch) -> Iterator[Any]:
        """Skip the batches that BatchNorm would refuse; at least one must be left. `samples(batch)` is the part the model reads."""
        left = False
        for batch in batches:
            if batch_size(batch) > 1 or not self.refused(samples(batch)):
                left = True
                yield batch
        if not left:
            raise InputError(argument, RULE, "batches of one")

    def refused(self, batch: Batch) -> bool:
        """Whether a BatchNorm would get one value per channel: one sample at one position. Computed once per shape."""
        if self._norms is None:
            modules = [module for module in self.model.modules() if isinstance(module, _BatchNorm)]
            self._norms = [module for module in modules if module.training or module.running_mean is None]
        if not self._norms:
            return False
        shapes = tuple(tensor.shape for tensor in tensors(batch))
        if shapes not in self._refused:
            self._refused[shapes] = self._gets_single_value(self._norms, batch)
        return self._refused[shapes]

    def _gets_single_value(self, norms: list[nn.Module], batch: Batch) -> bool:
        device = device_of(self.model)
        hooks = [norm.register_forward_pre_hook(_check_input, with_kwargs=True) for norm in norms]
        try:
            with in_mode(self.model, training=False), seeded(0, device), torch.no_grad(), eager():
                self.objective.logits(self.model, to_device(batch, device))
        except _SingleValue:
            return True
        finally:
            for hook in hooks:
                hook.remove()
        return False


class _SingleValue(Exception):
    pass


def _check_input(norm: nn.Module, arguments: tuple[Tensor, ...], keywords: Mapping[str, Tensor]) -> None:
    inputs = arguments[0] if arguments else keywords["input"]
    if inputs.numel() == inputs.shape[1]:
        raise _SingleValue
