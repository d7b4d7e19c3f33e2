"""Streams and files of samples read by several real processes: killed, and gone on with by another number of them, with the same bits."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import numpy
import pytest
import torch
from safetensors import safe_open
from torch.utils.data import TensorDataset

from expunge import fisher
from expunge.data.streams import Shards
from expunge.errors import MismatchError
from tests import processes
from tests.fisher import sharing

FILES = 13
SCRIPT = """
import sys
import torch.distributed as distributed
from expunge import fisher
from tests.data.test_streams_shared import source
from tests.fisher import sharing

distributed.init_process_group("gloo")
sums = fisher.by_chunks(sharing.case()[0], source(sys.argv[1], ".", pause=0.02), keep="pass", **sharing.CUT)
sums.save(f"sums-{distributed.get_rank()}.safetensors")
"""


class Slow(sharing.Stream):
    """Waits now and then, and notes how many samples it gave."""

    def __init__(self, data: TensorDataset, pause: float) -> None:
        super().__init__(data)
        self.pause, self.given = pause, 0

    def __len__(self) -> int:
        return len(self.data)

    def __iter__(self) -> Iterator[tuple[torch.Tensor, ...]]:
        for number, sample in enumerate(super().__iter__()):
            time.sleep(self.pause if number % 8 == 0 else 0)
            self.given += 1
            yield sample


def source(kind: str, folder: str | Path, pause: float = 0.0, opened: list[str] | None = None) -> Shards | Slow:
    """The same samples as a stream, or in 13 files of 40 each, the last of 43."""
    data = sharing.case()[1]
    if kind == "stream":
        return Slow(data, pause)

    def read(path: str) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        with numpy.load(Path(folder) / path) as content:
            for number, sample in enumerate(zip(torch.from_numpy(content["inputs"]), torch.from_numpy(content["labels"]), strict=True)):
                if number == 1 and opened is not None:
                    opened.append(path)
                time.sleep(pause if number % 8 == 7 else 0)
                yield sample

    names = [f"part-{number:02d}.npz" for number in range(FILES)]
    for number, name in enumerate(names):
        rows = slice(40 * number, None if number == FILES - 1 else 40 * (number + 1))
        if not (Path(folder) / name).exists():
            numpy.savez(Path(folder) / name, inputs=data.tensors[0][rows], labels=data.tensors[1][rows])
    return Shards(names, read)


def finished(folder: Path) -> int:
    """The chunks that are done: those in the total, and those that wait to be added."""
    total = folder / "total.safetensors"
    added = 0
    if total.exists():
        with safe_open(total, framework="pt") as file:
            added = int(file.metadata()["chunks"])
    return added + len(list(folder.glob("chunk-*")))


@pytest.mark.slow
@pytest.mark.parametrize("kind, stops", [("files", [(3, 3), (2, 7)]), ("stream", [(3, 3)])])
def test_a_pass_goes_on_with_another_number_of_processes(tmp_path, monkeypatch, kind, stops):
    monkeypatch.chdir(tmp_path)
    model, _ = sharing.case()
    whole = fisher.by_chunks(model, source(kind, "."), **sharing.CUT)
    assert whole.count == 523
    for size, least in stops:
        started = processes.start(SCRIPT, tmp_path, size, kind)
        end = time.monotonic() + 90
        while finished(tmp_path / "pass") < least:
            assert time.monotonic() < end and all(process.poll() is None for process in started)
            time.sleep(0.005)
        for process in started:
            process.send_signal(signal.SIGKILL)
        processes.printed(started, may_fail=True)
        assert [process.returncode for process in started] == [-9] * size
    done, opened = finished(tmp_path / "pass"), []
    rest = source(kind, ".", opened=opened)
    sums = fisher.by_chunks(model, rest, keep="pass", **sharing.CUT)
    assert sums.count == 523 and all(torch.equal(sums.sums[name], total) for name, total in whole.sums.items())
    if kind == "files":
        assert done >= 7 and len(opened) == FILES - done  # files that were done are not read again
    else:
        assert rest.given <= 523 + 32  # from its beginning, once, and the look at its first chunk


@pytest.mark.slow
def test_files_that_are_others_on_one_process_or_after_a_stop_are_named(tmp_path, monkeypatch):
    """As large as before, and with the same first sample: what differs is in the middle."""
    monkeypatch.chdir(tmp_path)
    model, _ = sharing.case()
    fisher.by_chunks(model, source("files", "."), keep="pass", **sharing.CUT)
    path = tmp_path / "part-06.npz"
    size = path.stat().st_size
    with numpy.load(path) as content:
        inputs, labels = content["inputs"], content["labels"]
    inputs[20] += 1
    numpy.savez(path, inputs=inputs, labels=labels)
    assert path.stat().st_size == size
    with pytest.raises(MismatchError, match="keep: pass belongs to a pass with another data .* there and fingerprint"):
        fisher.by_chunks(model, source("files", "."), keep="pass", **sharing.CUT)
    other = tmp_path / "other"
    other.mkdir()
    source("files", other)
    moved = 'import os\nos.chdir("other" if distributed.get_rank() else ".")\nsums = fisher'
    script = SCRIPT.replace("sums = fisher", moved).replace('keep="pass"', f"keep={str(tmp_path / 'shared')!r}")
    outputs = processes.printed(processes.start(script, tmp_path, 2, "files"), may_fail=True)
    assert all("all processes must have the same data (values, order" in output for output in outputs), outputs
    assert not os.path.exists(tmp_path / "shared")
