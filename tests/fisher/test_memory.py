"""The memory of a Fisher pass against a plain one, each in a process of its own."""

from __future__ import annotations

import ctypes
import gc
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.processes import ROOT, environment

# Peak over that of a plain forward and backward pass, with what its gradients hold. A network with many weights for its activations has
# more: float64 sums are twice its weights, beside all activations, where a plain pass has the gradients alone, and these later.
# Each limit is some 0.1 above what is measured (1.05, 1.03, 1.21, 1.50, the same to 0.01 in every run, also beside other processes).
LIMITS = {"resnet20": 1.15, "densenet": 1.15, "vit": 1.3, "vgg16": 1.6}
# By default the C library keeps freed memory or gives it back as it happens to lie, and one peak in ten is off by a tenth or more. So every
# tensor of some size has pages of its own, which go when it goes, and all threads share one heap.
STEADY = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536", "MALLOC_TOP_PAD_": "0"}
SAMPLES = {"resnet20": 64, "densenet": 16, "vit": 64, "vgg16": 64}


def peak(name: str, fisher: bool) -> int:
    """The bytes that two batches add to this process."""
    sys.path.insert(0, str(ROOT / "benchmarks"))
    from networks import CASES  # type: ignore[import-not-found]

    from expunge.fisher import diagonal
    from expunge.fisher.doubting import Doubts
    from expunge.fisher.planning import definition

    # Whether rounding raises a doubt, of the plan or of drawn samples, hangs on the machine; a copy of the model in float64 settles it.
    definition.tolerance = lambda tensor: 1.0
    Doubts.unexplained = lambda self, *given: []  # type: ignore[method-assign]
    torch.manual_seed(0)
    model = CASES[name].build().eval()
    batches = [(torch.randn(SAMPLES[name], 3, 32, 32), torch.randint(0, 10, (SAMPLES[name],))) for _ in range(2)]

    def plain(given):
        for x, y in given:
            nn.functional.cross_entropy(model(x), y, reduction="sum").backward()
            model.zero_grad(set_to_none=True)

    run = (lambda given: diagonal(model, given)) if fisher else plain
    run([(x[:2], y[:2]) for x, y in batches])  # threads, kernels and handles are not the pass's
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = resident("VmRSS")
    run(batches)
    return resident("VmHWM") - before


def resident(entry: str) -> int:
    return next(1024 * int(line.split()[1]) for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(entry))


def measured(name: str, fisher: bool) -> int:
    command = [sys.executable, "-m", "tests.fisher.test_memory", name, "fisher" if fisher else "plain"]
    return int(subprocess.run(command, cwd=ROOT, env=environment(**STEADY), capture_output=True, text=True, check=True).stdout)


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the peak of a process is read as Linux tells it")
@pytest.mark.parametrize("name", LIMITS)
def test_peak_against_a_plain_pass(name):
    # The least of two runs: what else happens in a process can only add.
    plain, fisher = (min(measured(name, way) for _ in range(2)) for way in (False, True))
    assert plain > 50 * 2**20
    assert fisher <= LIMITS[name] * plain, f"{fisher / plain:.2f}"


if __name__ == "__main__":
    print(peak(sys.argv[1], sys.argv[2] == "fisher"))
