"""Time one audit alone: tier 1 of a ResNet20 on the full CIFAR-10, without re-learning and with it.

PYTHONPATH=src python benchmarks/audit_speed.py --device cuda      two minutes at most on an H200, nothing else running
"""

from __future__ import annotations

import argparse
import json
import time

import torch
from audit_setups import paper_setup

import expunge
from expunge.vision.scenarios import category


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--size", type=int, help="the first images alone, to try the program")
    options = parser.parse_args()
    setup = paper_setup(options.size)
    assert setup.saved is not None
    data = setup.data(options.device)
    scenario = category(data.train, [0], test=data.test)
    before, after = setup.saved("original", 0, options.device), setup.saved("retrained", 1, options.device)
    with torch.no_grad():
        before(data.test.batch_of(torch.arange(128))[0])  # the device's own start is no part of an audit
    times = {}
    for name, rounds in (("without re-learning", 0), ("with re-learning", 4)):
        started = time.perf_counter()
        settings = expunge.audit.Settings(rounds=rounds)
        report = expunge.audit(before, after, scenario.forget, scenario.remain, data.test, settings=settings, progress=False)
        times[name] = round(time.perf_counter() - started, 2)
        print(f"{name}: {times[name]} s, {report.verdict.sentence}", flush=True)
    about = {"torch": torch.__version__, "device": torch.cuda.get_device_name() if options.device == "cuda" else "cpu"}
    print(json.dumps(about | {"seconds": times, "samples": {"train": len(data.train), "test": len(data.test)}}))


if __name__ == "__main__":
    main()
