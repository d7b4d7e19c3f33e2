"""The time, the error and the memory of a pass."""

from __future__ import annotations

import copy
import ctypes
import gc
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
from networks import Case
from peers import VARIANTS, Pass, Sums, one_sample_loop
from torch import Tensor, nn

Batches = list[tuple[Tensor, Tensor]]
CHECKED_SAMPLES = 8
EXACT = 1e-5  # in float64; some peers keep float32 buffers there
SLOW = 4.0  # a pass this many times slower than the plain one runs less often
GRADIENT_BYTES = {"cpu": 2 << 30, "cuda": 16 << 30}  # the most that per-sample gradients may hold


@dataclass
class Row:
    """What is known about one variant on one network."""

    status: str = ""  # exact, partial, wrong, not exact, yardstick, not installed, not applicable
    note: str = ""
    split: int = 0  # the micro-batch size
    seconds: list[float] = field(default_factory=list)  # a round, whole pass
    ratios: list[float] = field(default_factory=list)  # to the plain pass of the same round
    error: float | None = None  # float64 against the float64 loop
    error_float32: float | None = None
    memory: int | None = None  # bytes over what the process held before


def network(case: Case, device: str) -> nn.Module:
    """The same seeded network each time, in eval mode, its BatchNorm statistics taken from data so that activations keep their scale."""
    torch.manual_seed(0)
    model = case.build().to(device)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.momentum = 1.0
    with torch.no_grad():
        model(torch.randn(32, 3, case.image, case.image).to(device))
    return model.eval()


def data(case: Case, device: str, batch: int, batches: int) -> Batches:
    generator = torch.Generator().manual_seed(1)
    return [
        (
            torch.randn(batch, 3, case.image, case.image, generator=generator).to(device),
            torch.randint(case.classes, (batch,), generator=generator).to(device),
        )
        for _ in range(batches)
    ]


def pieces(batches: Batches, size: int) -> Batches:
    return [piece for x, y in batches for piece in zip(x.split(size), y.split(size), strict=True)]


@contextmanager
def tensor_cores(enabled: bool) -> Iterator[None]:
    """TF32 for times, as users train; off for errors, where its 10-bit mantissa would be all one sees."""
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = enabled
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before


def seconds(run: Pass, batches: Batches) -> float:
    if batches[0][0].is_cuda:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        start.record()
        run(batches)
        end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end) / 1000
    begin = time.perf_counter()
    run(batches)
    return time.perf_counter() - begin


def check(row: Row, name: str, model: nn.Module, batches: Batches) -> None:
    """Compare a few samples with the float64 loop: the largest ‖F − F₆₄‖ / ‖F₆₄‖ over the parameters the variant returns."""
    variant = VARIANTS[name]
    x, y = batches[0][0][:CHECKED_SAMPLES], batches[0][1][:CHECKED_SAMPLES]
    with tensor_cores(False):
        found32 = variant.prepare(copy.deepcopy(model))([(x, y)])
        if variant.claim == "none":
            row.status = "yardstick"
            return
        double = copy.deepcopy(model).double()
        reference = one_sample_loop(copy.deepcopy(double))([(x.double(), y)])
        found = variant.prepare(double)([(x.double(), y)])
    row.error, row.error_float32 = worst(found, reference), worst(found32, reference)
    sizes = {key: value.numel() for key, value in reference.items()}
    missing = sum(size for key, size in sizes.items() if key not in found)
    if variant.claim == "not exact":
        row.status = "not exact"
    elif row.error > EXACT:
        row.status, row.note = "wrong", wrong_parameters(found, reference)
    else:
        row.status = "partial" if missing else "exact"
    if missing:
        names = [key for key in sizes if key not in found]
        share = 100 * missing / sum(sizes.values())
        row.note = f"leaves out {len(names)} of {len(sizes)} parameters ({share:.2g} % of the values), the first is {names[0]}"


def relative(found: Tensor, reference: Tensor) -> float:
    return ((found.double() - reference).norm() / reference.norm().clamp_min(1e-300)).item()


def worst(found: Sums, reference: Sums) -> float:
    return max(relative(value, reference[key]) for key, value in found.items())


def wrong_parameters(found: Sums, reference: Sums) -> str:
    names = [key for key, value in found.items() if relative(value, reference[key]) > EXACT]
    return f"{len(names)} of {len(found)} parameters are wrong, the first is {names[0]}"


def fastest_split(run: Pass, batches: Batches, parameters: int) -> int:
    """Halve the micro-batch while that helps, from the largest whose per-sample gradients fit."""
    size = len(batches[0][0])
    while size > 1 and 4 * parameters * size > GRADIENT_BYTES[batches[0][0].device.type]:
        size = (size + 1) // 2
    best, best_time = size, float("inf")
    while size >= 1:
        parts = pieces(batches[:1], size)
        taken = min(seconds(run, parts) for _ in range(2))
        if taken > best_time:
            break
        best, best_time, size = size, taken, size // 2
    return best


def time_rounds(rows: dict[str, Row], passes: dict[str, Pass], batches: Batches, rounds: int) -> None:
    """Interleaved: each round runs every variant once, starting one further on, and divides by that round's plain pass.

    A slow variant runs three rounds over a quarter of the batches, times four: it has no fixed cost to spread.
    """
    warm = {name: seconds(run, pieces(batches[:1], rows[name].split)) for name, run in passes.items()}
    warm = {name: min(warm[name], seconds(run, pieces(batches[:1], rows[name].split))) for name, run in passes.items()}
    slow = {name for name in passes if warm[name] > SLOW * warm["plain"] and name != "engine"}
    for index in range(rounds):
        names = [name for name in passes if index < 3 or name not in slow]
        shift = index % len(names)
        for name in names[shift:] + names[:shift]:
            some = batches[: max(1, len(batches) // 4)] if name in slow else batches
            taken = seconds(passes[name], pieces(some, rows[name].split))
            rows[name].seconds.append(taken * len(batches) / len(some))
        for name in names:
            rows[name].ratios.append(rows[name].seconds[-1] / rows["plain"].seconds[-1])


def extra_memory(name: str, case: Case, device: str, batches: Batches, split: int) -> int:
    """The peak a pass adds, to be called in a process of its own: one that has measured another variant holds memory it may reuse."""
    model = network(case, device)
    run = tensor_cores(True)(VARIANTS[name].prepare(model))
    run([(x[:2], y[:2]) for x, y in batches[:1]])  # threads, kernels and handles are not the pass's
    model.zero_grad(set_to_none=True)
    gc.collect()
    parts = pieces(batches, split)
    if device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run(parts)
        return torch.cuda.max_memory_allocated() - before
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM, the peak
    before = resident("VmRSS")
    run(parts)
    return resident("VmHWM") - before


def resident(entry: str) -> int:
    found = re.search(rf"{entry}:\s+(\d+)", Path("/proc/self/status").read_text())
    assert found is not None
    return 1024 * int(found[1])


def median(values: Sequence[float]) -> float:
    return torch.tensor(values, dtype=torch.float64).quantile(0.5).item()
