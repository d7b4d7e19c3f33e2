"""One job of the trials: train a network, measure Fisher sums, or run one variant and measure what it leaves."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.forgetting import images, measures, resets
from expunge import fisher
from expunge.data.objective import Objective
from expunge.model.copying import copied
from expunge.training import OneCycle, Phase, Steps, Tuning, replay, train, train_phases
from expunge.training.distillation import divergence
from expunge.training.teaching import Taught, teach
from expunge.vision import scenarios
from expunge.vision.zoo import build


@dataclass(frozen=True)
class Room:
    """Where a worker works: its device, the data, the folder of networks, and the recipe's length (160 epochs unless it is a rehearsal)."""

    folder: Path
    data: Path
    device: torch.device
    network: str = "resnet20"
    epochs: int = 160
    limit: int | None = None

    @cached_property
    def parts(self):
        return images.load(self.data, self.device, self.limit)

    @property
    def precision(self) -> str:
        return "bfloat16" if self.device.type == "cuda" else "float32"

    def scenario(self, spec: dict[str, Any], seed: int) -> scenarios.Scenario:
        train, validation = self.parts
        settings = {name: value for name, value in spec.items() if name != "kind"}
        if spec["kind"] == "category":
            return scenarios.category(train, settings["label"], validation=validation)
        return getattr(scenarios, spec["kind"])(train, **settings, validation=validation, seed=seed)

    def fresh(self, seed: int) -> nn.Module:
        return build(self.network, 10, 3, seed, self.device)

    def load(self, name: str) -> nn.Module:
        model, file = self.fresh(0), self.folder / "networks" / f"{name}.pt"
        for _ in range(1500):
            if file.exists():
                break
            time.sleep(1)
        model.load_state_dict({key: value.to(self.device) for key, value in torch.load(file, weights_only=True).items()})
        return model

    def save(self, name: str, content: Any, kind: str = "networks") -> None:
        file = self.folder / kind / f"{name}.pt"
        file.parent.mkdir(parents=True, exist_ok=True)
        torch.save(content, file.with_suffix(".partial"))
        file.with_suffix(".partial").rename(file)


def network_name(scenario: dict[str, Any] | None, seed: int, retrained: bool = False) -> str:
    """Of the network trained on the scenario's data; without one class or some samples the original is the same for all."""
    if scenario is None or (scenario["kind"] in ("category", "subset") and not retrained):
        return f"original-{seed}"
    words = "-".join(str(value) for value in scenario.values())
    return f"{'retrained' if retrained else 'original'}-{words}-{seed}"


def run(job: dict[str, Any], room: Room) -> dict[str, Any] | None:
    started = time.time()
    result = {"network": _network, "fisher": _fisher, "trial": _trial}[job["job"]](job, room)
    return None if result is None else {**job, **result, "total_seconds": round(time.time() - started, 1)}


def _network(job: dict[str, Any], room: Room) -> dict[str, Any]:
    seed, spec, retrained = job["seed"], job.get("scenario"), job.get("retrained", False)
    train_data, validation = room.parts
    if spec is not None:
        scenario = room.scenario(spec, seed)
        train_data = scenario.retrain if retrained else scenario.train
    model, started = room.fresh(seed), time.time()
    schedule = Steps(0.1, room.epochs, (room.epochs * 0.5, room.epochs * 0.75))
    train(model, train_data, Tuning(schedule, seed=seed, precision=room.precision))
    seconds = round(time.time() - started, 1)
    name = network_name(spec, seed, retrained)
    room.save(name, {key: value.detach().cpu().clone() for key, value in model.state_dict().items()})
    return {"name": name, "seconds": seconds, "validation": measures.accuracy(*measures.outputs(model, validation))}


def _fisher(job: dict[str, Any], room: Room) -> dict[str, Any]:
    model, started = room.load(network_name(job["scenario"], job["seed"])).eval(), time.time()
    forget, remain = room.scenario(job["scenario"], job["seed"])
    sums = [
        fisher.diagonal(model, data, kind="expected", batch_size=250 if room.device.type == "cuda" else 64) for data in (forget, remain)
    ]
    room.save(_fisher_name(job), [{"sums": part.sums, "count": part.count, "digest": part.digest} for part in sums], "fisher")
    return {"seconds": round(time.time() - started, 1)}


def _fisher_name(job: dict[str, Any]) -> str:
    return "-".join(str(value) for value in [*job["scenario"].values(), job["seed"]])


def _sums(job: dict[str, Any], room: Room) -> tuple[fisher.FisherSums, fisher.FisherSums] | None:
    if job["reset"].get("score") not in ("difference", "ratio"):
        return None
    file = room.folder / "fisher" / f"{_fisher_name(job)}.pt"
    for _ in range(1500):
        if file.exists():
            break
        time.sleep(1)
    held = torch.load(file, weights_only=True, map_location=room.device)
    first, second = (fisher.FisherSums(part["sums"], part["count"], "expected", part["digest"]) for part in held)
    return first, second


def _trial(job: dict[str, Any], room: Room) -> dict[str, Any]:
    seed, spec = job["seed"], job["scenario"]
    scenario, label = room.scenario(spec, seed), spec.get("label")
    original = room.load(network_name(spec, seed))
    reference = room.load(network_name(spec, seed, retrained=True)) if job.get("compare") else None
    if job["method"] == "retrained":
        assert reference is not None
        model, result = reference, {}
    elif job["method"] == "original":
        model, result = original, {}
    else:
        model, result = _unlearned(job, room, scenario, original, label)
    return result | _measured(job, room, scenario, model, original, reference, label)


def _unlearned(job: dict[str, Any], room: Room, scenario, original: nn.Module, label: int | None) -> tuple[nn.Module, dict[str, Any]]:
    model, fresh = copied(original), room.fresh(1000 + job["seed"])
    if job.get("values") == "torch":
        for module in fresh.modules():
            if hasattr(module, "reset_parameters"):
                module.reset_parameters()
    sums = _sums(job, room)
    _synchronize(room)
    started = time.time()
    batch = tuple(part[:2] for part in scenario.train.batch_of(torch.arange(2))) if hasattr(scenario.train, "batch_of") else None
    batch = batch or tuple(torch.stack([scenario.train[row][place] for row in range(2)]) for place in range(2))
    mask = resets.chosen(model, job["reset"], batch, sums)
    weights = resets.renew(model, fresh, mask)
    rate, epochs = job.get("rate", 0.1), job["epochs"]
    schedule = replay(Steps(rate), epochs) if job.get("schedule") == "replayed" else OneCycle(rate, epochs)
    size = job.get("batch", 128)
    tuning = Tuning(schedule, size, seed=job["seed"], precision=room.precision, weight_decay=job.get("decay", 1e-4))
    taught = teach(scenario.remain, original, batch_size=size, without=() if label is None else (label,))
    phase = _phase(taught, job, label)
    train_phases(model, lambda epoch: [phase], tuning)
    _synchronize(room)
    layers = sorted({name.rpartition(".")[0] for name in mask if mask[name].dim() > 1})
    return model, {"seconds": round(time.time() - started, 2), "weights": weights, "layers": layers if len(layers) < 12 else len(layers)}


def _phase(taught: Taught, job: dict[str, Any], label: int | None) -> Phase:
    """`exclude`: the class is taken out of both softmaxes, or of the teacher's alone, where it gets probability 0."""
    temperature, weight, exclude, objective = job["temperature"], job["weight"], job.get("exclude", "both"), Objective()

    def loss(model: nn.Module, batch: Any, losses: Any) -> Tensor:
        samples, answers = batch
        student = objective.outputs(model, samples)
        labels = losses(student, objective.targets(samples)).mean()
        if not weight:
            return labels
        if exclude == "both" or label is None:
            apart = divergence(taught.kept(answers), taught.kept(student), temperature)
        else:
            goal = (taught.kept(answers).float() / temperature).log_softmax(1)
            apart = (goal.exp() * (goal - taught.kept((student.float() / temperature).log_softmax(1)))).sum(1)
        return (1 - weight) * labels + weight * temperature**2 * apart.mean()

    return Phase(taught.batches, "remain", loss, lambda batch: batch[0], graphable=True)


def _measured(
    job: dict[str, Any], room: Room, scenario, model: nn.Module, original: nn.Module, reference: nn.Module | None, label: int | None
) -> dict[str, Any]:
    found: dict[str, Any] = {}
    unseen = {name: measures.outputs(model, data) for name, data in scenario.validation.items()}
    seen = measures.outputs(model, scenario.forget)
    for name, held in unseen.items():
        found[name] = measures.accuracy(*held)
    found["forget_trained"] = measures.accuracy(*seen)
    found["loss"] = {"remain": measures.loss(*unseen["remain"]), "forget": measures.loss(*seen)}
    found["scale"] = {name: measures.scale(unseen[name][0], label) for name in ("remain", "forget")}
    if label is None:
        found["auc"] = measures.attack(*seen, *unseen["remain"])
        return found
    if reference is not None:
        others = {name: measures.outputs(reference, scenario.validation[name])[0] for name in ("remain", "forget")}
        found["to_retrained"] = {name: measures.distance(unseen[name][0], logits) for name, logits in others.items()}
    train_data, validation = room.parts
    if job.get("probe"):
        found["probe"] = measures.probes(model, train_data, validation, label)
    if job.get("relearn"):
        found["relearn"] = measures.relearn(
            model, scenario.train, scenario.forget, scenario.validation["forget"], job["relearn"], room.precision
        )
        found["relearn"]["goal"] = measures.loss(*measures.outputs(original, scenario.forget))
    return found


def _synchronize(room: Room) -> None:
    if room.device.type == "cuda":
        torch.cuda.synchronize()


def line(result: dict[str, Any]) -> str:
    return json.dumps(result, separators=(",", ":"))
