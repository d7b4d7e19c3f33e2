"""What measuring activations costs: the pass behind ActivationMask and TfIdfMask against a plain forward pass over the same batches.

Run `OMP_WAIT_POLICY=active PYTHONPATH=src python benchmarks/activation_speed.py` on an idle machine; torch and numpy are enough.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "src"))

import torch  # noqa: E402
from torch import Tensor, nn  # noqa: E402

from expunge.model import activations, channels  # noqa: E402
from expunge.vision.networks import NETWORKS  # noqa: E402

TARGET = 1.15  # of ActivationMask's pass to the plain one
CLASSES = 10
Batches = list[tuple[Tensor, Tensor]]
Pass = Callable[[nn.Module, Batches], object]


def plain(model: nn.Module, batches: Batches) -> None:
    with torch.no_grad():
        for inputs, _ in batches:
            model(inputs)


def activation(model: nn.Module, batches: Batches) -> object:
    """All a score needs of one set: which channels there are, and their sums."""
    return activations.measure(model, batches, channels.find(model, batches[0]))


def tf_idf(model: nn.Module, batches: Batches) -> object:
    return activations.measure(model, batches, channels.find(model, batches[0]), classes=range(CLASSES), before_norm=True)


# The plain pass a second time shows what the machine's noise is.
PASSES: dict[str, Pass] = {"plain": plain, "plain again": plain, "activation": activation, "tf-idf": tf_idf}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--networks", nargs="+", choices=NETWORKS, default=["resnet20", "vgg16", "densenet100"])
    parser.add_argument("--passes", nargs="+", choices=PASSES, default=list(PASSES), help="always with the plain one")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--batches", type=int, default=2)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument(
        "--json", type=Path, help="default: benchmarks/results/cpu-activation.json; networks that are not run now stay in it"
    )
    parser.add_argument("--quick", action="store_true", help="resnet20, 8 samples, 2 rounds, no file unless --json")
    options = parser.parse_args()
    if options.quick:
        options.networks, options.rounds, options.batch_size = ["resnet20"], 2, 8
    elif options.json is None:
        options.json = ROOT / "benchmarks" / "results" / "cpu-activation.json"
    return options


def network(name: str) -> nn.Module:
    """Seeded, in eval mode, its BatchNorm statistics taken from data so that activations keep their scale."""
    torch.manual_seed(0)
    model = NETWORKS[name](CLASSES)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.momentum = 1.0
    with torch.no_grad():
        model(torch.randn(32, 3, 32, 32))
    return model.eval()


def measure(name: str, options: argparse.Namespace) -> dict[str, list[float]]:
    """Seconds of each pass, interleaved: each round runs every pass once, starting one further on."""
    model, generator = network(name), torch.Generator().manual_seed(1)
    batches = [
        (torch.randn(options.batch_size, 3, 32, 32, generator=generator), torch.arange(options.batch_size) % CLASSES)
        for _ in range(options.batches)
    ]
    names = list(dict.fromkeys(["plain", *options.passes]))
    seconds: dict[str, list[float]] = {variant: [] for variant in names}
    for variant in names:
        PASSES[variant](model, batches[:1])
    for index in range(options.rounds):
        shift = index % len(names)
        for variant in names[shift:] + names[:shift]:
            begin = time.perf_counter()
            PASSES[variant](model, batches)
            seconds[variant].append(time.perf_counter() - begin)
    return seconds


def summary(seconds: dict[str, list[float]]) -> dict[str, dict[str, object]]:
    """Ratios to the plain pass of the same round: their median and range."""
    rows = {}
    for variant, times in seconds.items():
        ratios = [taken / base for taken, base in zip(times, seconds["plain"], strict=True)]
        rows[variant] = {"seconds": median(times), "ratio": median(ratios), "range": [min(ratios), max(ratios)], "all_seconds": times}
    return rows


def table(name: str, rows: dict[str, dict[str, object]], options: argparse.Namespace) -> str:
    lines = [f"{name}: {options.batches} batches of {options.batch_size}, {options.rounds} rounds", ""]
    lines += [f"{'pass':<12}  {'seconds':>8}  {'ratio':>6}  {'min-max':>11}"]
    for variant, row in rows.items():
        low, high = row["range"]
        lines.append(f"{variant:<12}  {row['seconds']:>8.3f}  {row['ratio']:>6.3f}  {low:.3f}-{high:.3f}")
    if "activation" in rows:
        found = rows["activation"]["ratio"]
        lines.append(f"{'met' if found <= TARGET else 'MISSED'}: activation at most {TARGET} plain passes: {found:.3f}")
    return "\n".join(lines)


def main() -> None:
    options = arguments()
    torch.set_num_threads(options.threads)
    models = [line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    about = {
        "hardware": {"cpu": models[0] if models else platform.machine(), "cores": os.cpu_count(), "threads": options.threads},
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "wait_policy": os.environ.get("OMP_WAIT_POLICY", "default"),
        "date": time.strftime("%Y-%m-%d"),
        "target": TARGET,
    }
    results = json.loads(options.json.read_text())["results"] if options.json and options.json.exists() else {}
    for name in options.networks:
        rows = summary(measure(name, options))
        print(table(name, rows, options), end="\n\n", flush=True)
        results[name] = {"batch_size": options.batch_size, "batches": options.batches, "rounds": options.rounds, "passes": rows}
        if options.json:  # after each network, so that a run that is stopped leaves what it has
            options.json.write_text(json.dumps({**about, "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
