"""The exact diagonal Fisher: ours against a plain forward and backward, and against the other libraries.

Run `benchmarks/install && .venv-bench/bin/python benchmarks/fisher_speed.py`; see benchmarks/README.md for the method.
"""

from __future__ import annotations

import argparse
import copy
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
import textwrap
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "src"))

import torch  # noqa: E402
from measure import Batches, Row, check, data, extra_memory, fastest_split, median, network, tensor_cores, time_rounds  # noqa: E402
from networks import CASES, CPU_DEFAULT, CUDA_DEFAULT, Case  # noqa: E402
from peers import VARIANTS, Pass  # noqa: E402

RATIO_TARGETS = {"resnet20": 1.2, "vgg16": 1.3}
LEAD_TARGETS = {"resnet20": 1.3, "vgg16": 1.3}  # times faster than every exact peer; on the others: faster
MEMORY_TARGET = 2.0


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--networks", nargs="+", choices=CASES, help="default: all but resnet50, which is for CUDA")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--batch-size", type=int, help="default: 64 (densenet 32); on CUDA resnet20 1024, resnet50 64")
    parser.add_argument("--batches", type=int, help="default: 16")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--quick", action="store_true", help="2 batches, 3 rounds, no memory")
    parser.add_argument("--memory-of", nargs=2, metavar=("VARIANT", "SPLIT"), help=argparse.SUPPRESS)  # the child process of `memory`
    options = parser.parse_args()
    options.networks = options.networks or list(CPU_DEFAULT if options.device == "cpu" else CUDA_DEFAULT)
    if options.quick:
        options.rounds, options.batches = 3, 2
    return options


def batches_of(case: Case, options: argparse.Namespace) -> Batches:
    size = options.batch_size or case.batch[options.device == "cuda"]
    return data(case, options.device, size, options.batches or case.batches)


def measure(name: str, options: argparse.Namespace) -> dict[str, Row]:
    """All variants on one network."""
    case = CASES[name]
    model, batches = network(case, options.device), batches_of(case, options)
    rows: dict[str, Row] = {}
    passes: dict[str, Pass] = {}
    for variant in dict.fromkeys(["plain", *options.variants]):
        say(f"{name}: checking {variant}")
        row = rows[variant] = Row(split=len(batches[0][0]))
        try:
            check(row, variant, model, batches)
            run = VARIANTS[variant].prepare(copy.deepcopy(model))
            if VARIANTS[variant].splits:
                with tensor_cores(True):
                    row.split = fastest_split(run, batches, sum(parameter.numel() for parameter in model.parameters()))
            passes[variant] = run
        except ImportError as error:
            row.status, row.note = "not installed", str(error)
        except Exception as error:  # whatever a peer raises is its answer
            row.status, row.note = "not applicable", textwrap.shorten(f"{type(error).__name__}: {error}", 200)
    say(f"{name}: timing {len(passes)} variants")
    with tensor_cores(True):
        time_rounds(rows, passes, batches, options.rounds)
    if not options.quick:
        say(f"{name}: memory")
        with ThreadPoolExecutor(1 if options.device == "cpu" else len(passes)) as pool:
            list(pool.map(lambda variant: memory(rows[variant], name, variant, options), passes))
    return rows


def memory(row: Row, name: str, variant: str, options: argparse.Namespace) -> None:
    command = [sys.executable, __file__, "--networks", name, "--memory-of", variant, str(row.split), "--batches", "2"]
    command += ["--device", options.device, "--threads", str(options.threads)]
    command += ["--batch-size", str(options.batch_size)] if options.batch_size else []
    child = subprocess.run(command, capture_output=True, text=True)
    if child.returncode == 0:
        row.memory = int(child.stdout.split()[-1])
    else:
        row.note = "; ".join(filter(None, [row.note, f"no memory figure: {(child.stderr.strip() or 'killed').splitlines()[-1]}"]))


def table(name: str, rows: dict[str, Row], options: argparse.Namespace) -> str:
    case = CASES[name]
    size = options.batch_size or case.batch[options.device == "cuda"]
    per_sample = median(rows["plain"].seconds) / size / (options.batches or case.batches) * 1000
    lines = [f"{name}: {size} samples a batch, {options.batches or case.batches} batches; plain pass {per_sample:.3g} ms a sample", ""]
    heads = ("variant", "ratio", "min-max", "rounds", "split", "result", "error f64", "error f32", "extra MB")
    cells = [heads, *[cell_texts(variant, row) for variant, row in rows.items()]]
    widths = [max(len(line[column]) for line in cells) for column in range(len(heads))]
    for line in [heads, tuple("-" * width for width in widths), *cells[1:]]:
        padded = [text.rjust(width) for text, width in zip(line, widths, strict=True)]
        lines.append("  ".join([line[0].ljust(widths[0]), *padded[1:]]))
    notes = [f"  {variant}: {row.note}" for variant, row in rows.items() if row.note]
    return "\n".join([*lines, *notes])


def cell_texts(variant: str, row: Row) -> tuple[str, ...]:
    timed = bool(row.ratios)
    return (
        variant,
        f"{median(row.ratios):.2f}" if timed else "-",
        f"{min(row.ratios):.2f}-{max(row.ratios):.2f}" if timed else "-",
        str(len(row.ratios)) if timed else "-",
        str(row.split) if timed else "-",
        row.status,
        "-" if row.error is None else f"{row.error:.0e}",
        "-" if row.error_float32 is None else f"{row.error_float32:.0e}",
        "-" if row.memory is None else f"{row.memory / 1e6:.0f}",
    )


def targets(name: str, rows: dict[str, Row]) -> list[dict[str, Any]]:
    """What the engine is held to on this network. A peer that leaves parameters out does less work, and is still counted."""
    ours = rows.get("engine")
    if ours is None or not ours.ratios:
        return []
    ratio = median(ours.ratios)
    judged = [{"network": name, "target": "exact", "found": ours.status, "met": ours.status == "exact"}]
    if name in RATIO_TARGETS:
        judged.append(entry(name, f"at most {RATIO_TARGETS[name]} plain passes", ratio, ratio <= RATIO_TARGETS[name]))
    lead = LEAD_TARGETS.get(name, 1.0)
    peers = {variant: row for variant, row in rows.items() if variant != "engine" and row.status in ("exact", "partial") and row.ratios}
    if peers:
        nearest = min(peers, key=lambda variant: median(peers[variant].ratios))
        times = median(peers[nearest].ratios) / ratio
        judged.append(entry(name, f"{lead} times faster than every exact peer (nearest: {nearest})", times, times >= lead and times > 1))
    if ours.memory is not None and rows["plain"].memory:
        share = ours.memory / rows["plain"].memory
        judged.append(entry(name, f"at most {MEMORY_TARGET} times the plain pass's extra memory", share, share <= MEMORY_TARGET))
    return judged


def entry(name: str, target: str, found: float, met: bool) -> dict[str, Any]:
    return {"network": name, "target": target, "found": round(found, 3), "met": met}


def surroundings(options: argparse.Namespace) -> dict[str, Any]:
    packages = {package for variant in VARIANTS.values() for package in variant.packages} | {"torch", "numpy"}
    versions: dict[str, str | None] = {"python": platform.python_version()}
    for package in sorted(packages):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = None
    models = [line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    hardware = {"cpu": models[0] if models else platform.machine(), "cores": os.cpu_count(), "threads": options.threads}
    if options.device == "cuda":
        hardware["gpu"] = torch.cuda.get_device_name()
    return {"versions": versions, "hardware": hardware, "date": time.strftime("%Y-%m-%d")}


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main() -> None:
    options = arguments()
    torch.set_num_threads(options.threads)
    warnings.simplefilter("ignore")  # the peers' deprecations
    if options.memory_of:
        variant, split = options.memory_of
        case = CASES[options.networks[0]]
        print(extra_memory(variant, case, options.device, batches_of(case, options), int(split)))
        return
    about = surroundings(options)
    print("\n".join(f"{key}: " + ", ".join(f"{name} {value}" for name, value in about[key].items()) for key in ("hardware", "versions")))
    results, judged = {}, []
    for name in options.networks:
        rows = measure(name, options)
        results[name] = {variant: asdict(row) for variant, row in rows.items()}
        judged += targets(name, rows)
        print(f"\n{table(name, rows, options)}", flush=True)
        if options.json:  # after each network, so that a run that is stopped leaves what it has
            content = {**about, "settings": settings(options), "results": results, "targets": judged}
            options.json.write_text(json.dumps(content, indent=1) + "\n")
    if judged:
        print("\ntargets")
    for one in judged:
        print(f"  {'met   ' if one['met'] else 'MISSED'}  {one['network']}: {one['target']}: {one['found']}")


def settings(options: argparse.Namespace) -> dict[str, Any]:
    kept = ("networks", "variants", "rounds", "batch_size", "batches", "device", "threads", "quick")
    return {key: getattr(options, key) for key in kept}


if __name__ == "__main__":
    main()
