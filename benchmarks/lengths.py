"""The Fisher engine over few and over many batches, as a ratio to a plain pass in the faster of two memory layouts.

Run `python benchmarks/lengths.py` on an idle machine; torch and numpy are enough. On CUDA with TF32. The passes run in turn; medians and
ranges of the ratios to that round's faster plain pass. A first call of the engine comes before and is printed by itself.
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "src"))

import torch  # noqa: E402
from measure import data, median, network, seconds, tensor_cores  # noqa: E402
from networks import CASES  # noqa: E402
from peers import VARIANTS  # noqa: E402

FEW = 16
MANY = {"resnet20": 48, "densenet": 64}  # others 96
PLAIN = ("plain", "plain-channels-last")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--networks", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--batch-size", type=int, help="default: that of fisher_speed.py")
    parser.add_argument("--lengths", type=int, nargs="+", help="default: 16, and 48 to 96")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    results: dict[str, Any] = {}
    for name in options.networks:
        with tensor_cores(True):
            results[name] = measured(name, options)
        if options.json:
            place = torch.cuda.get_device_name() if options.device == "cuda" else options.device
            about = {"torch": torch.__version__, "device": place, "date": time.strftime("%Y-%m-%d"), "rounds": options.rounds}
            options.json.write_text(json.dumps({**about, "results": results}, indent=1) + "\n")


def measured(name: str, options: argparse.Namespace) -> dict[str, Any]:
    case = CASES[name]
    model = network(case, options.device)
    batches = data(case, options.device, options.batch_size or case.batch[options.device == "cuda"], FEW)
    passes = {variant: VARIANTS[variant].prepare(copy.deepcopy(model)) for variant in (*PLAIN, "engine")}
    found: dict[str, Any] = {"first call": seconds(passes["engine"], batches[:2])}
    print(f"{name}: the engine's first call in this process, 2 batches, {found['first call']:.2f} s", flush=True)
    for run in passes.values():
        run(batches[:2])
    for count in options.lengths or (FEW, MANY.get(name, 96)):
        some = (batches * -(-count // FEW))[:count]
        times: dict[str, list[float]] = {variant: [] for variant in passes}
        for number in range(options.rounds):
            order = list(passes)
            for variant in order[number % 3 :] + order[: number % 3]:
                times[variant].append(seconds(passes[variant], some))
        floor = [min(each) for each in zip(*(times[variant] for variant in PLAIN), strict=True)]
        ratios = [taken / plain for taken, plain in zip(times["engine"], floor, strict=True)]
        default = [taken / plain for taken, plain in zip(times["engine"], times["plain"], strict=True)]
        found[str(count)] = {"seconds": times, "to the faster": ratios, "to the default": default}
        plain = ", ".join(f"{variant} {median(times[variant]):.3f} s" for variant in PLAIN)
        print(
            f"{name}, {count} batches: {plain}, engine {median(times['engine']):.3f} s; to the faster {median(ratios):.3f} "
            f"({min(ratios):.3f}-{max(ratios):.3f}), to the default layout {median(default):.3f}",
            flush=True,
        )
    if options.device == "cuda":
        found["memory"] = {variant: peak(run, batches[:8]) for variant, run in passes.items()}
        told = ", ".join(f"{variant} {value >> 20} MiB" for variant, value in found["memory"].items())
        print(f"{name}, extra memory over 8 batches: {told}", flush=True)
    return found


def peak(run: Any, batches: Any) -> int:
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run(batches)
    return torch.cuda.max_memory_allocated() - before


if __name__ == "__main__":
    main()
