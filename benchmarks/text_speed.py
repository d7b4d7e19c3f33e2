"""The exact diagonal Fisher on padded text (16 to 128 tokens, batches of 32) against a plain forward and backward, and torch.func.

Run `PYTHONPATH=src python benchmarks/text_speed.py`, on a GPU also with `--networks bert-base gpt2-small`; without transformers it
measures the encoder of text_networks.py alone.
"""

from __future__ import annotations

import argparse
import copy
import importlib.util
import json
import os
import platform
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "src"))

import torch  # noqa: E402
from text_networks import CASES, Batch, Case  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torch.func import functional_call, grad, vmap  # noqa: E402
from torch.nn import functional  # noqa: E402

from expunge import fisher  # noqa: E402
from expunge.data.objective import Objective  # noqa: E402

Sums = dict[str, Tensor]
Pass = Callable[[nn.Module, list[Batch]], Sums]
CHECKED, EXACT = 4, 1e-10
OF_FULL_SIZE = ("bert-base", "gpt2-small")  # for a GPU, where plain passes of the others are launches alone


def token_losses(logits: Tensor, targets: Tensor) -> Tensor:
    """−log p of a sample's tokens, summed over those that count; tokens end to end, as transformers has them.

    With the classes along dimension 1 torch's kernel takes 9 ms for 32 texts of 128 tokens of 8,192 on an H200, here 0.3.
    """
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view(targets.shape).sum(1)


def objective(case: Case) -> Objective:
    return Objective(losses=token_losses, classes=False) if case.tokens else Objective()


def passes(case: Case) -> dict[str, Pass]:
    own = objective(case)

    def losses(model: Callable[..., Any], batch: Batch) -> Tensor:
        return own.losses(own.logits(model, batch), batch["labels"])

    def plain(model: nn.Module, batches: list[Batch]) -> Sums:
        for batch in batches:
            model.zero_grad(set_to_none=True)
            losses(model, batch).sum().backward()
        return {}

    def loop(model: nn.Module, batches: list[Batch]) -> Sums:
        sums = {name: torch.zeros_like(value) for name, value in model.named_parameters()}
        for batch in batches:
            for index in range(len(batch["labels"])):
                model.zero_grad(set_to_none=True)
                losses(model, {key: value[index : index + 1] for key, value in batch.items()}).sum().backward()
                for name, value in model.named_parameters():
                    sums[name] += 0 if value.grad is None else value.grad.square()
        return sums

    def by_vmap(model: nn.Module, batches: list[Batch], size: int = 4) -> Sums:
        values = {name: value.detach() for name, value in model.named_parameters()}
        sums = {name: torch.zeros_like(value) for name, value in values.items()}

        def loss(weights: Sums, sample: Batch) -> Tensor:
            inputs = {key: value[None] for key, value in sample.items() if key != "labels"}
            output = functional_call(model, weights, (), inputs)
            return own.losses(getattr(output, "logits", output), sample["labels"][None])[0]

        for batch in batches:
            for start in range(0, len(batch["labels"]), size):  # more at a time is slower here: the gradients leave the cache
                some = {key: value[start : start + size] for key, value in batch.items()}
                for name, gradient in vmap(grad(loss), (None, 0))(values, some).items():
                    sums[name] += gradient.square().sum(0)
        return sums

    def engine(model: nn.Module, batches: list[Batch]) -> Sums:
        return fisher.diagonal(model, batches, objective=own).sums

    return {"plain": plain, "engine": engine, "vmap": by_vmap, "loop": loop}


def worst(sums: Sums, reference: Sums) -> float:
    """The largest ‖F − F₆₄‖ / ‖F₆₄‖ of a tensor; one that is but rounding (the bias of attention's keys) is held to the largest of all."""
    largest = max(float(value.norm()) for value in reference.values())
    return max(float((sums[name].double() - value).norm()) / max(float(value.norm()), 1e-12 * largest) for name, value in reference.items())


def measure(name: str, options: argparse.Namespace) -> dict[str, Any]:
    case = CASES[name]
    torch.manual_seed(0)
    model = case.build().to(options.device).eval()
    generator = torch.Generator().manual_seed(1)
    batches = [{k: v.to(options.device) for k, v in case.data(options.batch_size, generator).items()} for _ in range(options.batches)]
    variants = {variant: run for variant, run in passes(case).items() if variant in ("plain", *options.variants)}
    rows: dict[str, Any] = {variant: {"status": "yardstick", "seconds": [], "ratios": []} for variant in variants}
    few = [{key: value[:CHECKED] for key, value in batches[0].items()}]
    double = copy.deepcopy(model).double()
    wide = [{key: value.double() if value.is_floating_point() else value for key, value in few[0].items()}]
    reference = passes(case)["loop"](double, wide)
    for variant in [variant for variant in variants if variant != "plain"]:
        try:
            error = worst(variants[variant](copy.deepcopy(double), wide), reference)
            rows[variant] |= {"status": "exact" if error < EXACT else "wrong", "error": error}
            rows[variant]["error_float32"] = worst(variants[variant](copy.deepcopy(model), few), reference)
        except Exception as error:  # what a peer cannot do
            rows[variant] |= {"status": "not applicable", "note": f"{type(error).__name__}: {error}"[:200]}
            variants.pop(variant)
    clock = time.process_time if options.clock == "process" else time.perf_counter
    for run in variants.values():
        seconds(run, model, batches[:1], clock)
    for index in range(options.rounds):
        turn = list(variants)
        for variant in turn[index % len(turn) :] + turn[: index % len(turn)]:
            # The peers have no fixed cost to spread: a quarter of the batches will do.
            some = batches if variant in ("plain", "engine") else batches[: max(1, len(batches) // 4)]
            rows[variant]["seconds"].append(seconds(variants[variant], model, some, clock) * len(batches) / len(some))
        for variant in turn:
            rows[variant]["ratios"].append(rows[variant]["seconds"][-1] / rows["plain"]["seconds"][-1])
    return rows


def seconds(run: Pass, model: nn.Module, batches: list[Batch], clock: Callable[[], float]) -> float:
    model.zero_grad(set_to_none=True)
    on_cuda = next(model.parameters()).is_cuda
    if on_cuda:
        torch.cuda.synchronize()
    begin = clock()
    run(model, batches)
    if on_cuda:
        torch.cuda.synchronize()
    return clock() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    known = [name for name in CASES if name not in OF_FULL_SIZE] if importlib.util.find_spec("transformers") else ["encoder"]
    parser.add_argument("--networks", nargs="+", choices=CASES, default=known)
    parser.add_argument("--variants", nargs="+", default=["engine", "vmap", "loop"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--batches", type=int, default=8)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument(
        "--clock", choices=["wall", "process"], default="wall", help="process: the processor's time, on a machine with other work"
    )
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    warnings.simplefilter("ignore")
    hardware = {"machine": platform.machine(), "cores": os.cpu_count(), "threads": options.threads}
    if options.device == "cuda":
        hardware["gpu"] = torch.cuda.get_device_name()
    about = {"torch": torch.__version__, "hardware": hardware, "date": time.strftime("%Y-%m-%d"), "load": os.getloadavg()[0]}
    results = {}
    for name in options.networks:
        results[name] = measure(name, options)
        for variant, row in results[name].items():
            ratios = sorted(row["ratios"])
            timed = f"{ratios[len(ratios) // 2]:6.2f} ({ratios[0]:.2f}-{ratios[-1]:.2f})" if ratios else "     -"
            errors = "  ".join(f"{row[key]:.0e}" for key in ("error", "error_float32") if key in row)
            print(f"{name:8} {variant:8} {timed:20} {row['status']:12} {errors} {row.get('note', '')}", flush=True)
        if options.json:
            kept = {key: str(value) if isinstance(value, Path) else value for key, value in vars(options).items()}
            options.json.write_text(json.dumps({**about, "settings": kept, "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
