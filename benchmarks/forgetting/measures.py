"""What a trial measures of a network: accuracies, distance to the retrained one, probes of its stages, how fast it learns again."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from expunge.data.batches import as_batches
from expunge.model.copying import copied
from expunge.training import Constant, Tuning, train

STAGES = ("stage1", "stage2", "stage3")


def outputs(model: nn.Module, data) -> tuple[Tensor, Tensor]:
    """Logits and labels, in eval mode and float32."""
    rows = [_answer(model, *batch) for batch in as_batches(data, "data", 1000)]
    return torch.cat([logits for logits, _ in rows]), torch.cat([labels for _, labels in rows])


@torch.no_grad()
def _answer(model: nn.Module, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    mode, _ = model.training, model.eval()
    logits = model(images.to(next(model.parameters()).device)).float()
    model.train(mode)
    return logits, labels.to(logits.device)


def accuracy(logits: Tensor, labels: Tensor) -> float:
    return round(100 * float((logits.argmax(1) == labels).double().mean()), 2)


def loss(logits: Tensor, labels: Tensor) -> float:
    return round(float(functional.cross_entropy(logits.double(), labels)), 5)


def scale(logits: Tensor, label: int | None) -> dict[str, float]:
    """How far logits are spread over the kept classes, how far below them the forgotten one lies, and the mean confidence."""
    kept = logits if label is None else torch.cat([logits[:, :label], logits[:, label + 1 :]], 1)
    found = {"spread": float(kept.std(1).mean()), "confidence": float(logits.softmax(1).amax(1).mean())}
    if label is not None:
        found["below"] = float((kept.mean(1) - logits[:, label]).mean())
    return {name: round(value, 3) for name, value in found.items()}


def distance(logits: Tensor, reference: Tensor) -> dict[str, float]:
    """To the retrained network: share of equal answers, KL(reference ‖ model) and Jensen-Shannon divergence (in bits), means."""
    one, other = (part.double().log_softmax(1) for part in (reference, logits))
    middle = torch.logaddexp(one, other) - torch.log(torch.tensor(2.0))
    kl = (one.exp() * (one - other)).sum(1)
    js = 0.5 * ((one.exp() * (one - middle)).sum(1) + (other.exp() * (other - middle)).sum(1)) / torch.log(torch.tensor(2.0))
    agreement = (logits.argmax(1) == reference.argmax(1)).double().mean()
    return {"agreement": round(100 * float(agreement), 2), "kl": round(float(kl.mean()), 4), "js": round(float(js.mean()), 4)}


def attack(forget: Tensor, labels: Tensor, others: Tensor, other_labels: Tensor) -> float:
    """AUC of "a lower loss means it was seen": forget samples against held-out ones; 0.5: nothing to tell."""
    seen, unseen = (
        functional.cross_entropy(forget, labels, reduction="none"),
        functional.cross_entropy(others, other_labels, reduction="none"),
    )
    order = unseen.sort().values
    above = len(order) - torch.searchsorted(order, seen, right=True)
    equal = torch.searchsorted(order, seen, right=True) - torch.searchsorted(order, seen)
    return round(float((above.double() + 0.5 * equal.double()).mean() / len(order)), 4)


def probes(model: nn.Module, train_data, validation, label: int, rows: int = 20000) -> dict[str, list[float]]:
    """Linear classifiers of all classes on the pooled outputs of every stage: recall of the class and accuracy, on validation data."""
    chosen = torch.randperm(len(train_data), generator=torch.Generator().manual_seed(0))[:rows]
    batches = [train_data.batch_of(part) for part in chosen.split(1000)]
    held = [validation.batch_of(part) for part in torch.arange(len(validation)).split(1000)]
    found = {}
    known, asked = _pooled(model, batches), _pooled(model, held)
    labels, answers = (torch.cat([batch[1] for batch in part]) for part in (batches, held))
    for stage in STAGES:
        mean, deviation = known[stage].mean(0), known[stage].std(0) + 1e-6
        weights = _fit((known[stage] - mean) / deviation, labels.to(mean.device))
        logits = ((asked[stage] - mean) / deviation) @ weights[:-1] + weights[-1]
        right = logits.argmax(1) == answers.to(mean.device)
        found[stage] = [round(100 * float(right[answers == label].double().mean()), 2), round(100 * float(right.double().mean()), 2)]
    return found


@torch.no_grad()
def _pooled(model: nn.Module, batches) -> dict[str, Tensor]:
    held: dict[str, list[Tensor]] = {stage: [] for stage in STAGES}
    hooks = [
        getattr(model, stage).register_forward_hook(lambda module, x, y, stage=stage: held[stage].append(y.float().mean((2, 3))))
        for stage in STAGES
    ]
    for images, labels in batches:
        _answer(model, images, labels)
    for hook in hooks:
        hook.remove()
    return {stage: torch.cat(parts) for stage, parts in held.items()}


def _fit(features: Tensor, labels: Tensor) -> Tensor:
    weights = torch.zeros(features.shape[1] + 1, 10, device=features.device, requires_grad=True)
    optimizer = torch.optim.LBFGS([weights], max_iter=100, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimizer.zero_grad()
        value = functional.cross_entropy(features @ weights[:-1] + weights[-1], labels) + 1e-4 * weights.square().sum()
        value.backward()
        return value

    optimizer.step(closure)
    return weights.detach()


def relearn(model: nn.Module, data, forget, unseen, epochs: int, precision: str) -> dict[str, list[float]]:
    """Train on all data at rate 0.01; before and after every epoch the loss on the forget data, and accuracies on them and on unseen
    samples of the class."""
    learner = copied(model)
    curve: dict[str, list[float]] = {"loss": [], "accuracy": [], "unseen": []}

    def note(epoch: int) -> None:
        logits, labels = outputs(learner, forget)
        curve["loss"].append(loss(logits, labels))
        curve["accuracy"].append(accuracy(logits, labels))
        curve["unseen"].append(accuracy(*outputs(learner, unseen)))

    note(0)
    train(learner, data, Tuning(Constant(0.01, epochs), precision=precision), after_epoch=note)
    return curve
