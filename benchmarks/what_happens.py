"""What a call of the Fisher engine does on a GPU: passes made eagerly, captured and replayed, why a capture failed, its comparisons.

With the time that the host takes for each: to launch, not to run.

Run `PYTHONPATH=src python benchmarks/what_happens.py gpt2 swin resnet50`; torch is enough, and transformers for most networks on text.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "src"))

import networks  # noqa: E402
import text_networks  # noqa: E402
import torch  # noqa: E402
from measure import data, network, tensor_cores  # noqa: E402
from text_speed import objective  # noqa: E402

from expunge import fisher  # noqa: E402
from expunge.data.objective import Objective  # noqa: E402
from expunge.fisher import adders, comparing  # noqa: E402
from expunge.fisher.comparing import Comparison  # noqa: E402
from expunge.fisher.confirming import Confirmation  # noqa: E402
from expunge.fisher.queueing import QueuedConfirmation  # noqa: E402
from expunge.runtime.cuda_graphs import GraphedStep  # noqa: E402


class Watch:
    """Counts what happens in the calls within."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.errors: list[str] = []
        self.confirmations: list[Confirmation] = []
        self.seconds: Counter[str] = Counter()

    def timed(self, name: str, function: Any) -> Any:
        def call(*given: Any, **settings: Any) -> Any:
            began = time.perf_counter()
            try:
                return function(*given, **settings)
            finally:
                self.seconds[name] += time.perf_counter() - began

        return call

    def __enter__(self) -> Watch:
        run, capture, begun, init = GraphedStep._run, GraphedStep._capture, Comparison.begun, Confirmation.__init__

        def counted_run(step: Any, batch: Any, aside: Any) -> Any:
            plain, made = step.step, []

            def eager(*given: Any) -> Any:
                made.append(torch.cuda.is_available() and torch.cuda.is_current_stream_capturing())
                try:
                    return plain(*given)
                except Exception as error:
                    self.errors.append(f"{type(error).__name__}: {str(error).splitlines()[0]}")
                    raise

            step.step = eager
            try:
                return run(step, batch, aside)
            finally:
                step.step = plain
                self.counts["eager" if False in made else "replayed"] += 1

        def counted_capture(step: Any, *given: Any) -> None:
            capture(step, *given)
            self.counts["captured" if step.capturable else "captures failed"] += 1

        def counted_begun(comparison: Any, *given: Any, **settings: Any) -> Any:
            self.counts["comparisons"] += 1
            return begun(comparison, *given, **settings)

        def noted(confirmation: Any, *given: Any, **settings: Any) -> None:
            init(confirmation, *given, **settings)
            self.confirmations.append(confirmation)

        self.patches = [
            patch.object(GraphedStep, "_run", counted_run),
            patch.object(GraphedStep, "_capture", self.timed("captures", counted_capture)),
            patch.object(adders, "obvious_plan", self.timed("plan", adders.obvious_plan)),
            patch.object(comparing, "keep", self.timed("planned passes of drawn samples", comparing.keep)),
            patch.object(QueuedConfirmation, "_queue", self.timed("comparisons", QueuedConfirmation._queue)),
            patch.object(QueuedConfirmation, "_read", self.timed("reading them", QueuedConfirmation._read)),
            patch.object(Comparison, "begun", counted_begun),
            patch.object(Confirmation, "__init__", noted),
        ]
        for each in self.patches:
            each.start()
        return self

    def __exit__(self, *error: object) -> None:
        for each in self.patches:
            each.stop()

    def __str__(self) -> str:
        last = self.confirmations[-1]
        modes = [name for name in ("_patient", "_precise", "irregular") if getattr(last, name, False)]
        times = [f"{name} {1000 * seconds:.0f} ms" for name, seconds in self.seconds.items()]
        return ", ".join([*(f"{name} {count}" for name, count in self.counts.items()), *modes, *dict.fromkeys(self.errors), *times])


def given(name: str, device: str, count: int) -> tuple[torch.nn.Module, list[Any], Objective]:
    if name in networks.CASES:
        case = networks.CASES[name]
        return network(case, device), data(case, device, case.batch[device == "cuda"], count), Objective()
    text = text_networks.CASES[name]
    generator = torch.Generator().manual_seed(0)
    batches = [{key: value.to(device) for key, value in text.data(32, generator).items()} for _ in range(count)]
    return text.build().to(device).eval(), batches, objective(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("networks", nargs="+", choices=[*networks.CASES, *text_networks.CASES])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--batches", type=int, default=8)
    options = parser.parse_args()
    for name in options.networks:
        torch.manual_seed(0)
        model, batches, own = given(name, options.device, options.batches)
        with tensor_cores(True):
            for call in ("first", "second"):
                started = time.perf_counter()
                with Watch() as watch:
                    fisher.diagonal(model, batches, objective=own)
                print(f"{name}, {call} call, {len(batches)} batches, {time.perf_counter() - started:.2f} s: {watch}", flush=True)


if __name__ == "__main__":
    main()
