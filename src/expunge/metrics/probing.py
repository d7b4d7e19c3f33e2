"""Measure what a linear classifier can still read in the inner outputs of a model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from expunge.data.batches import Data, as_batches, device_of, to_device
from expunge.data.classes import check_classes
from expunge.data.labels import as_labels
from expunge.data.objective import Objective
from expunge.errors import DivergedError, InputError, ModelError, naming
from expunge.model.checks import check_module
from expunge.runtime.modes import eager, in_mode, seeded, unchanged

RIDGE = 1e-4  # on the squared weights of the classifier
ITERATIONS = 100


@dataclass(frozen=True)
class Probe:
    """A linear classifier on the output of a module: its accuracy on all held-out samples, and on those of each class (recall)."""

    module: str
    accuracy: float
    recall: dict[int, float]


@torch.inference_mode(False)  # also where the caller is in it: to fit needs gradients
def linear_probes(
    model: nn.Module, modules: Sequence[str] | str, data: Data, held_out: Data, objective: Objective = Objective(), batch_size: int = 128
) -> list[Probe]:
    """Fit a classifier of all classes to the output of each module on `data`, and measure it on `held_out`.

    minimise mean_n cross-entropy(W·x_n + b, y_n) + 1e-4·(‖W‖² + ‖b‖²), x the module's output, averaged over its positions, each feature
    with mean 0 and deviation 1 over `data`; by L-BFGS. A class that the recall of a network which never saw it is as high for is not known:
    compare with a retrained network. The model runs in eval mode and stays as it is.
    """
    check_module(model)
    modules = [*dict.fromkeys([modules] if isinstance(modules, str) else modules)]
    known, labels = _features(model, modules, data, "data", objective, batch_size)
    asked, answers = _features(model, modules, held_out, "held_out", objective, batch_size)
    classes = int(max(labels.max(), answers.max())) + 1
    probes = []
    for name in modules:
        mean, deviation = known[name].mean(0), known[name].std(0, correction=0) + 1e-6
        weights = fitted((known[name] - mean) / deviation, labels, classes)
        right = (((asked[name] - mean) / deviation) @ weights[:-1] + weights[-1]).argmax(1) == answers
        recall = {label: float(right[answers == label].double().mean()) for label in answers.unique().tolist()}
        probes.append(Probe(name, float(right.double().mean()), recall))
    return probes


def _features(
    model: nn.Module, modules: Sequence[str], data: Data, argument: str, objective: Objective, batch_size: int
) -> tuple[dict[str, Tensor], Tensor]:
    """The outputs of each module, averaged over positions, and the labels."""
    known = dict(model.named_modules())
    if unknown := [name for name in modules if name not in known]:
        some = [name for name in known if name]
        rule = f"must name modules of the model, such as {', '.join(some[:4] + ['...'] * (len(some) > 4))}"
        raise InputError("modules", rule, ", ".join(map(str, unknown)))
    if not modules:
        raise InputError("modules", "must name at least one module", "none")
    outputs: dict[str, list[Tensor]] = {name: [] for name in modules}
    labels: list[Tensor] = []

    def keep(name: str) -> Any:
        return lambda module, inputs, output: outputs[name].append(pooled(output, name))

    home, hooks = device_of(model), [known[name].register_forward_hook(keep(name)) for name in modules]
    try:
        with naming(argument), seeded(0, home), in_mode(model, training=False), torch.no_grad(), eager(), unchanged(model):
            for batch in as_batches(data, argument, batch_size):
                batch = to_device(batch, home)
                logits = objective.logits(model, batch)
                check_classes(objective, logits.shape, "a probe needs")
                objective.check_batch(logits.shape, batch, same_batch=True)
                labels.append(as_labels(objective.targets(batch)))
                if labels[-1].dim() != 1:
                    raise InputError(argument, "must have one label per sample", f"labels of shape {tuple(labels[-1].shape)}")
    finally:
        for hook in hooks:
            hook.remove()
    features = {name: torch.cat(parts) for name, parts in outputs.items() if parts}
    if silent := [name for name in modules if name not in features or len(features[name]) != len(torch.cat(labels))]:
        raise ModelError(f"model: {silent[0]} must be called once per batch to be probed")
    if broken := [name for name in modules if not torch.isfinite(features[name]).all()]:
        raise DivergedError(f"the outputs of {broken[0]} on {argument} are not finite: the model diverged, nothing was measured")
    return features, torch.cat(labels)


def pooled(output: Any, name: str) -> Tensor:
    """The output of a module as one row of features per sample, averaged over its positions."""
    if not isinstance(output, Tensor) or output.dim() < 2:
        raise ModelError(f"model: the output of {name} must be a tensor with a row per sample to be probed")
    # Pictures are (N, C, H, W), sequences (N, L, C).
    return output.float().flatten(2).mean(2) if output.dim() > 3 else output.float().mean(1) if output.dim() == 3 else output.float()


def fitted(features: Tensor, labels: Tensor, classes: int) -> Tensor:
    """The weights of a linear classifier of standardised features, a row for each feature and the last for the bias.

    In float64, until a step lowers the loss by less than 1e-12: probabilities are those of scikit-learn's LogisticRegression to 1e-4, which
    is not used, as results must not depend on what is installed, and features may be on a GPU.
    """
    with torch.enable_grad(), torch.autocast(features.device.type, enabled=False):
        wide = features.float() if features.device.type == "mps" else features.double()  # Apple's GPUs have no float64
        weights = torch.zeros(features.shape[1] + 1, classes, dtype=wide.dtype, device=features.device, requires_grad=True)
        optimizer = torch.optim.LBFGS([weights], max_iter=ITERATIONS, tolerance_change=1e-12, line_search_fn="strong_wolfe")

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = cross_entropy(wide @ weights[:-1] + weights[-1], labels) + RIDGE * weights.square().sum()
            loss.backward()
            return loss

        optimizer.step(closure)
    return weights.detach().float()
