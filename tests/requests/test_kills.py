"""Killed at any moment, a request leaves the folder as it was or as it is at the end, and the same command goes on.

`EXPUNGE_KILLS=100` kills every command a hundred times (`make kills`).
"""

import json
import os
import random
import shutil
import time

import pytest

from expunge.requests.folder import misfits, receipt_at
from tests.kills.run import timeless, written
from tests.requests.forking import Commands, server
from tests.requests.small import MASK, request

pytestmark = pytest.mark.skipif(not os.path.exists("/proc/self/stat"), reason="processes are forked, and looked at, as on Linux")
KILLS = int(os.environ.get("EXPUNGE_KILLS", "4"))
GIVEN = ("--task", "mytask.py", "--weights", "model.safetensors", "--threads", "1", "--quiet")
UNLEARN = ("unlearn", *GIVEN, "--out", "out", "--forget")
BUILD = ("fisher", "build", *GIVEN, "--out")
BY_MASK = ("--method", "fisher-mask", "--set", *MASK.given)
ACCUMULATED = ("0-9", "label=3", "20,21,22")
REQUESTS = {
    "mask": [(*UNLEARN, forget, *BY_MASK, "--no-audit") for forget in ACCUMULATED],
    "mask from stored sums": [(*UNLEARN, forget, *BY_MASK, "--no-audit", "--sums", "sums") for forget in ACCUMULATED],
    "fine-tuning": [(*UNLEARN, forget, "--method", "finetune", "--no-audit") for forget in ACCUMULATED[:2]],
    "its own loss": [(*UNLEARN, "0-9", "--method", "neg-grad-plus", "--no-audit")],
    "choice": [(*UNLEARN, "label=3", "--set", "epochs=12", "--no-audit")],
    "audit": [(*UNLEARN, "label=3", "--method", "finetune")],
}


@pytest.fixture(scope="module")
def started(tmp_path_factory):
    with server() as process:
        commands = Commands(process, tmp_path_factory.mktemp("warm"))
        request(commands.folder)
        for command in ((*UNLEARN, "label=3"), (*UNLEARN, "0-9", *BY_MASK), (*BUILD, "sums"), ("undo", "out", "--out", "back.safetensors")):
            commands.warm(*command)
        yield process


@pytest.fixture
def commands(started, tmp_path):
    folder = tmp_path / "here"
    folder.mkdir()
    request(folder)
    return Commands(started, folder)


def disturbed(commands, command, moment, generator, most=24):
    """Start a command and kill it: half of the times at some moment, half right after it has changed its folder for the n-th time,
    n up to `most`."""
    before, running, began = written(commands.folder), commands.start(*command), time.monotonic()
    changes = generator.choice((0, generator.randint(1, most)))
    at = generator.uniform(0, 1.1) * moment
    while running.is_alive() and (changes > 0 if changes else time.monotonic() - began < at):
        if changes and (now := written(commands.folder)) != before:
            before, changes = now, changes - 1
            if not changes:
                break
        time.sleep(0.001)  # the command needs the processor too
    if running.is_alive():
        running.kill()
    code = running.wait()
    assert code in (0, -9), commands.log.read_text()
    return code == -9


def emptied(folder, kept):
    for path in folder.iterdir():
        if path.name not in kept:
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def found(folder):
    """What a folder of requests says, without times and salts."""
    receipt = receipt_at(folder / "receipt.json")
    audit = folder / "audit.json"
    return receipt.number, receipt.weights_after, timeless(json.loads(audit.read_bytes()), "") if audit.exists() else None


@pytest.mark.slow
@pytest.mark.parametrize("name", REQUESTS)
def test_killed_at_any_moment_nothing_is_lost_or_half_written(name, commands):
    sequence, folder, generator = REQUESTS[name], commands.folder, random.Random(name)
    if "sums" in name:
        commands.run(*BUILD, "built")
    given = {path.name for path in folder.iterdir()}

    def prepare():
        emptied(folder, given)
        if "sums" in name:
            shutil.copytree(folder / "built", folder / "sums")

    prepare()
    expected, seconds = [], []
    for command in sequence:
        seconds.append(commands.run(*command))
        expected.append(found(folder / "out"))
    left = {path.name for path in folder.iterdir()}
    prepare()
    kills = done = rounds = 0
    while kills < KILLS or done:
        rounds += 1
        assert rounds < 20 * KILLS
        if kills < KILLS:
            kills += disturbed(commands, sequence[done], seconds[done], generator)
        else:
            commands.run(*sequence[done])
        # What is there is whole: the last request's, or the next one's. Only the recovery of the next command may put it back in place.
        if (folder / "out").exists():
            assert list(misfits(folder / "out")) == []
            done = found(folder / "out")[0]
            assert found(folder / "out") == expected[done - 1]
        if done == len(sequence):
            commands.run(*sequence[-1])  # the last command may have been killed after its folder was in place
            assert found(folder / "out") == expected[-1] and {path.name for path in folder.iterdir()} == left
            prepare()
            done = 0


@pytest.mark.slow
def test_of_two_at_once_one_waits_for_another_day(commands):
    request(commands.folder)
    two = [commands.start(*UNLEARN, forget, *BY_MASK, "--no-audit") for forget in ("0-9", "label=3")]
    codes = sorted(running.wait() for running in two)
    assert codes in ([0, 0], [0, 2])
    assert list(misfits(commands.folder / "out")) == []


@pytest.mark.slow
def test_a_store_that_is_killed_while_it_is_built_is_built_to_the_bit(commands):
    def contents(name):
        return {path.name: path.read_bytes() for path in sorted((commands.folder / name).iterdir()) if path.name != ".lock"}

    seconds, generator, kills = commands.run(*BUILD, "whole"), random.Random(0), 0
    for _ in range(20 * KILLS):
        killed = disturbed(commands, (*BUILD, "store"), seconds, generator)
        kills += killed
        if not killed:
            assert contents("store") == contents("whole")
            shutil.rmtree(commands.folder / "store")
        if kills >= KILLS:
            break
    commands.run(*BUILD, "store")
    assert contents("store") == contents("whole")


@pytest.mark.slow
def test_a_merge_that_is_killed_ends_with_what_one_build_stores(commands):
    def contents(name):
        return {path.name: path.read_bytes() for path in sorted((commands.folder / name).iterdir()) if path.name != ".lock"}

    commands.run(*BUILD, "whole")
    for number in (1, 2):
        commands.run(*BUILD, f"shard{number}", "--shard", f"{number}/2")
    merge, generator, kills = ("fisher", "merge", "shard1", "shard2", "--out", "store"), random.Random(0), 0
    shards = contents("shard1"), contents("shard2")
    seconds = commands.run(*merge[:-1], "first")
    for _ in range(20 * KILLS):
        killed = disturbed(commands, merge, seconds, generator)
        kills += killed
        if not killed:
            assert contents("store") == contents("whole")
            shutil.rmtree(commands.folder / "store")
        if kills >= KILLS:
            break
    commands.run(*merge)
    assert contents("store") == contents("whole") and (contents("shard1"), contents("shard2")) == shards


@pytest.mark.slow
def test_an_audit_that_is_killed_says_the_same_in_the_end(commands):
    commands.run(*UNLEARN, "0-29", "--method", "finetune", "--no-audit")
    audit = ("audit", "--task", "mytask.py", "--before", "model.safetensors", "--after", "out/weights.safetensors", "--forget", "0-29")
    audit, generator, kills = (*audit, "--quiet", "--out"), random.Random(0), 0
    seconds = commands.run(*audit, "whole")
    whole, names = said(commands.folder / "whole"), {path.name for path in (commands.folder / "whole").iterdir()}
    for _ in range(20 * KILLS):
        killed = disturbed(commands, (*audit, "audit"), seconds, generator)
        kills += killed
        if (commands.folder / "audit" / "result.json").exists():
            assert said(commands.folder / "audit") in (None, whole)
        if not killed:
            shutil.rmtree(commands.folder / "audit")
        if kills >= KILLS:
            break
    commands.run(*audit, "audit")
    assert said(commands.folder / "audit") == whole and {path.name for path in (commands.folder / "audit").iterdir()} == names


def said(folder):
    """What an audit found, without its times; None where it is not all written."""
    content = json.loads((folder / "result.json").read_bytes())
    return timeless(content["audit"], "") if "audit" in content else None


@pytest.mark.slow
def test_undo_and_prove_write_a_file_whole_or_not_at_all(commands):
    folder, generator, kills = commands.folder, random.Random(0), 0
    commands.run(*UNLEARN, "0-9", *BY_MASK, "--no-audit")
    every = {"back.safetensors": ("undo", "out", "--out"), "proof.json": ("prove", "out", "--id", "3", "--out")}
    seconds = {name: commands.run(*command, f"whole-{name}") for name, command in every.items()}
    for _ in range(40 * KILLS):
        for name, command in every.items():
            kills += disturbed(commands, (*command, name), seconds[name], generator, most=2)
            if (folder / name).exists():
                assert (folder / name).read_bytes() == (folder / f"whole-{name}").read_bytes()
                (folder / name).unlink()
        if kills >= 2 * KILLS:
            break
    for name, command in every.items():
        commands.run(*command, name)
    assert list(misfits(folder / "out")) == [] and not any(".expunge-unfinished" in path.name for path in folder.iterdir())
