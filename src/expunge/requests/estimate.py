"""Estimate what a request would cost, before anything is done."""

from __future__ import annotations

import time
from collections.abc import Iterator

import torch

from expunge.data.batches import as_batches, batch_size, device_of, to_device
from expunge.errors import InputError
from expunge.methods import Choose, Method
from expunge.methods.choosing.rungs import lengthened
from expunge.methods.choosing.situation import fitting_batch_size
from expunge.model.copying import copied
from expunge.requests.prepared import Prepared
from expunge.requests.request import one_number_of_threads
from expunge.runtime.modes import in_mode, seeded
from expunge.training.tuning import Tuning

BATCHES = 3  # timed; the first of a process is slow


def estimate(prepared: Prepared) -> Iterator[str]:
    """What would be done, a line each, and how long a pass takes here. Nothing is written, no weight is changed."""
    samples, parameters = prepared.task.rows.samples, sum(parameter.numel() for parameter in prepared.model.parameters())
    kept = samples - len(prepared.rows)
    yield f"model: {type(prepared.model).__name__}, {parameters:,} weights, on {prepared.device}"
    yield f"forget: {len(prepared.rows):,} of {samples:,} samples ({len(prepared.new):,} by this request), remain: {kept:,}"
    yield f"method: {prepared.method!r}"
    if prepared.replaced is not None:
        yield prepared.replaced
    size = _batch_size(prepared, kept)
    per_sample = _seconds_per_sample(prepared, size)
    seconds = per_sample * kept
    yield f"a training pass over the remain data takes about {shown_time(seconds)} here"
    if prepared.summed is None:
        yield from _passes(prepared.method, seconds, len(as_batches(prepared.remain, "remain", size)))
    else:
        yield from _with_store(prepared.method, prepared.summed, per_sample, kept)
    stored = sum(tensor.numel() * tensor.element_size() for tensor in prepared.model.state_dict().values())
    yield f"disk: up to {6 * stored / 1e6:,.1f} MB (the weights, and a patch that leads back to the original)"


def _batch_size(prepared: Prepared, kept: int) -> int:
    """Of the training; of its own data's loader where there is one."""
    tuning = getattr(prepared.method, "tuning", None)
    if isinstance(prepared.method, Choose):
        return fitting_batch_size(kept)
    return tuning.batch_size if isinstance(tuning, Tuning) else prepared.settings.batch_size


def _passes(method: Method, seconds: float, steps: int) -> Iterator[str]:
    """`steps`: batches of a pass over the remain data."""
    tuning = getattr(method, "tuning", None)
    if isinstance(method, Choose) and method.epochs is not None:
        yield f"passes: at most {method.epochs:g}; time: about {shown_time(method.epochs * seconds)}"
    elif isinstance(method, Choose):
        fewest, most = (lengthened(epochs, steps) for epochs in (10, 60))
        yield f"passes: as many as the settings that are tried take, {fewest} to {most} as a rule"
        yield f"time: about {shown_time(fewest * seconds)} to {shown_time(most * seconds)}"
    elif isinstance(tuning, Tuning):
        epochs = tuning.schedule.epochs
        yield f"passes: {epochs} of training, and up to 2 for a score; time: about {shown_time((epochs + 2) * seconds)}"
    else:
        yield f"passes: up to 2, no training by a recipe; time: about {shown_time(2 * seconds)}"


def _with_store(method: Method, summed: int, per_sample: float, kept: int) -> Iterator[str]:
    """Of a Fisher mask whose sums are stored: those of its own samples alone are missing, and of a whole class none."""
    tuning = getattr(method, "tuning", None)
    epochs = tuning.schedule.epochs if isinstance(tuning, Tuning) else 0
    passes = f"stored sums: passes over {summed:,} samples alone"
    training = f", and {epochs} passes of training" if epochs else ", no training"
    yield f"{passes}{training}; time: about {shown_time((summed + epochs * kept) * per_sample)}"


def shown_time(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 120 else f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def _seconds_per_sample(prepared: Prepared, size: int) -> float:
    """Of reading it, and of a forward and a backward pass, on a copy."""
    model, device, objective = copied(prepared.model), device_of(prepared.model), prepared.task.objective
    timed: list[tuple[float, int]] = []
    with seeded(0, device), in_mode(model, training=False), one_number_of_threads(prepared.settings.threads):
        started = time.perf_counter()
        for _, batch in zip(range(BATCHES), as_batches(prepared.remain, "remain", size), strict=False):
            batch = to_device(batch, device)
            loss = objective.per_sample(objective.logits(model, batch), objective.targets(batch)).mean()
            if loss.requires_grad:
                loss.backward()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            now = time.perf_counter()
            timed.append((now - started, _samples(batch)))
            started = now
    return min(seconds / samples for seconds, samples in timed)


def _samples(batch: object) -> int:
    try:
        return batch_size(batch)
    except InputError:  # of one's own objective
        return 1
