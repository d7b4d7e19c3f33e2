"""Killed at any moment, a request leaves the folder as it was or as it is at the end, and the same command goes on."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import expunge
from expunge.requests.folder import misfits, receipt_at
from expunge.requests.request import fulfil
from tests.kills.run import written
from tests.requests.small import MASK, request

KILLS = int(os.environ.get("EXPUNGE_KILLS", "24"))
CALL = "import sys; from expunge.cli import main; sys.exit(main(sys.argv[1:]))"
SOURCE = str(Path(expunge.__file__).resolve().parents[1])
PATIENCE = 120.0


def run(folder, *command):
    streams = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": SOURCE}
    return subprocess.Popen([sys.executable, "-c", CALL, *command], cwd=folder, env=environment, **streams)


def started(folder, forget):
    command = ["unlearn", "--task", "mytask.py", "--weights", "model.safetensors", "--forget", forget, "--out", "out", "--quiet"]
    command += ["--method", "fisher-mask", "--set", *MASK.given, "--threads", "1"]
    return run(folder, *command)


def ended(folder, forget):
    finished(started(folder, forget))


def finished(process):
    _, told = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, told


@pytest.mark.slow
def test_killed_at_any_moment_nothing_is_lost_or_half_written(tmp_path):
    requests = ["0-9", "label=3", "20,21,22"]
    whole = tmp_path / "whole"
    whole.mkdir()
    expected = [fulfil(request(whole, forget)).weights_after for forget in requests]
    request(tmp_path)
    begun = time.monotonic()
    ended(tmp_path, requests[0])
    usual, generator, kills, done, rounds = time.monotonic() - begun, random.Random(0), 0, 1, 0
    out = tmp_path / "out"
    while kills < KILLS:
        rounds += 1
        assert rounds < 10 * KILLS
        process = started(tmp_path, requests[min(done, 2)])
        if rounds % 2:
            time.sleep(generator.uniform(0.6, 1.1) * usual)
        else:  # when it has begun to write
            before, wanted = written(tmp_path), generator.randrange(1, 12)
            while process.poll() is None and wanted:
                now = written(tmp_path)
                wanted, before = wanted - (now != before), now
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
            kills += 1
        process.communicate(timeout=PATIENCE)
        # What is there is whole: the last request's, or the next one's. Only the recovery of the next command may put it back in place.
        if out.exists():
            assert list(misfits(out)) == []
            assert (number := receipt_at(out / "receipt.json").number) in (done, done + 1)
            done = max(done, number) if done < 3 else 3
        if done == 3:
            ended(tmp_path, requests[2])
            assert receipt_at(out / "receipt.json").weights_after == expected[2]
            for path in sorted(out.iterdir()):
                path.unlink()
            out.rmdir()
            ended(tmp_path, requests[0])
            done = 1
    for forget in requests:
        ended(tmp_path, forget)
    assert receipt_at(out / "receipt.json").weights_after == expected[2] and list(misfits(out)) == []
    assert {path.name for path in tmp_path.iterdir()} == {"mytask.py", "model.safetensors", "out", "whole"}


@pytest.mark.slow
def test_of_two_at_once_one_waits_for_another_day(tmp_path):
    request(tmp_path)
    processes = [started(tmp_path, forget) for forget in ("0-9", "label=3")]
    told = [process.communicate(timeout=PATIENCE)[1] for process in processes]
    codes = sorted(process.returncode for process in processes)
    assert codes in ([0, 0], [0, 2])
    if codes == [0, 2]:
        assert any("must not be in use: another command is writing there" in line for line in told)
    assert list(misfits(tmp_path / "out")) == []


@pytest.mark.slow
def test_a_store_that_is_killed_while_it_is_built_is_built_to_the_bit(tmp_path):
    request(tmp_path)
    build = ["fisher", "build", "--task", "mytask.py", "--weights", "model.safetensors", "--threads", "1", "--quiet", "--out"]

    def contents(name):
        return {path.name: path.read_bytes() for path in sorted((tmp_path / name).iterdir()) if path.name != ".lock"}

    finished(run(tmp_path, *build, "whole"))
    generator = random.Random(0)
    for _ in range(max(4, KILLS // 4)):
        process, before, wanted = run(tmp_path, *build, "store"), written(tmp_path), generator.randrange(1, 8)
        while process.poll() is None and wanted:
            now = written(tmp_path)
            wanted, before = wanted - (now != before), now
        process.kill()
        process.communicate(timeout=PATIENCE)
    finished(run(tmp_path, *build, "store"))
    assert contents("store") == contents("whole")
