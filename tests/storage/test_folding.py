"""Chunks that are added in a folder: in their order, each once, whatever order they are finished in and wherever a process is killed."""

from __future__ import annotations

import os
import random
import shutil

import pytest
import torch

from expunge.errors import InputError, MismatchError
from expunge.storage.folding import TOGETHER, WINDOW, FoldedChunks, Sums


def sums(number: int) -> Sums:
    return Sums(
        {"a": torch.rand(5, generator=torch.Generator().manual_seed(number), dtype=torch.float64) * 10.0 ** (number % 7)}, number + 1
    )


def in_order(groups: list[str]) -> dict[str, tuple[list[float], int]]:
    """The slow and obvious fold."""
    totals: dict[str, tuple[list[float], int]] = {}
    for number, group in enumerate(groups):
        values = sums(number).sums["a"].tolist()
        before, count = totals.get(group, ([0.0] * 5, 0))
        totals[group] = ([a + b for a, b in zip(before, values, strict=True)], count + number + 1)
    return totals


@pytest.mark.parametrize("seed", range(4))
def test_the_order_of_finishing_does_not_matter(tmp_path, seed):
    groups, dice, most = ["x"] * 50 + ["y"] * 1 + ["z"] * 60, random.Random(seed), 0
    held: list[tuple[object, int]] = []
    folded = FoldedChunks(tmp_path / "pass", {"data": "some"}, groups)
    while not folded.is_done():
        if len(held) < 5:
            claim = folded.claim("me")
            number = claim.__enter__()
            if number is not None:
                assert number not in [other for _, other in held]
                held.append((claim, number))
            else:
                claim.__exit__(None, None, None)
        if held and (len(held) == 5 or dice.random() < 0.5):
            claim, number = held.pop(dice.randrange(len(held)))
            if dice.random() < 0.8:  # else its holder has ended without a result
                folded.put(number, sums(number))
            claim.__exit__(None, None, None)
        folded.fold()
        most = max(most, len(list((tmp_path / "pass").iterdir())))
    totals = {name: (part.sums["a"].tolist(), part.count) for name, part in folded.totals().items()}
    assert totals == in_order(groups)
    assert most <= WINDOW + 5 + 3 + 4  # chunks, claims, groups, and the rest


def test_a_kill_at_any_step_of_adding_is_made_good(tmp_path, monkeypatch):
    groups = ["x"] * 3 + ["y"] * (TOGETHER - 3)
    folded = FoldedChunks(tmp_path / "pass", {}, groups)
    for number in range(len(groups)):
        folded.put(number, sums(number))
    written = FoldedChunks._write
    for step in range(4):
        shutil.copytree(tmp_path / "pass", tmp_path / f"copy{step}")
        copy, left = FoldedChunks(tmp_path / f"copy{step}", {}, groups), [step]

        def write(self, *arguments, left=left):
            if not left[0]:
                raise KeyboardInterrupt
            left[0] -= 1
            written(self, *arguments)

        monkeypatch.setattr(FoldedChunks, "_write", write)
        if step < 3:  # two groups and the total are written
            with pytest.raises(KeyboardInterrupt):
                copy.fold()
        monkeypatch.setattr(FoldedChunks, "_write", written)
        copy.fold()
        assert {name: (part.sums["a"].tolist(), part.count) for name, part in copy.totals().items()} == in_order(groups)
        assert not list((tmp_path / f"copy{step}").glob("chunk-*"))


@pytest.mark.skipif(not os.path.exists("/dev/fd"), reason="where descriptors have no names, files that are open are not replaced")
def test_what_is_added_can_be_asked_while_another_process_adds(tmp_path, monkeypatch):
    """The last total has no tensors, so it is shorter than what the header before it says: a process that asked then raised, rarely."""
    asking, adding = (FoldedChunks(tmp_path / "pass", {}, ["x"] * (TOGETHER + 1)) for _ in range(2))
    for number in range(TOGETHER):
        adding.put(number, sums(number))
    adding.fold()
    adding.put(TOGETHER, sums(TOGETHER))
    opened, times = torch.UntypedStorage.from_file, []

    def added_meanwhile(*arguments, **options):  # between the two times that safetensors opens a file
        monkeypatch.setattr(torch.UntypedStorage, "from_file", opened)
        adding.fold()
        times.append(1)
        return opened(*arguments, **options)

    monkeypatch.setattr(torch.UntypedStorage, "from_file", added_meanwhile)
    assert asking.added() == TOGETHER and times  # as it was when the question began
    assert asking.is_done()


def test_processes_that_read_other_samples_all_get_the_error(tmp_path):
    """One computed chunk 0 and another chunk 1, neither of them both: what each read of the other's chunk tells."""
    first, second = (FoldedChunks(tmp_path / "pass", {}, ["x"] * 2) for _ in range(2))
    first.put(0, sums(0), [10])
    second.put(1, sums(1), [99, 11])
    for process in (first, second, first):
        with pytest.raises(MismatchError, match="data: chunk 0 of .* held other samples"):
            process.fold()
    assert not (tmp_path / "pass" / "total.safetensors").exists()


@pytest.mark.parametrize("changed", [0, 5, 69, None])
def test_what_was_added_is_compared_with_what_is_read_later(tmp_path, changed):
    digests = [7 * number for number in range(100)]
    folded = FoldedChunks(tmp_path / "pass", {}, ["x"] * 100)
    for number in range(72):
        folded.put(number, sums(number), digests[: number + 1])
        folded.fold()
    assert folded.added() == 72 and folded.check(digests) is None
    other = [digest + (number == changed) for number, digest in enumerate(digests)]
    if changed is None:
        folded.put(75, sums(75), other[:76])
        return
    with pytest.raises(MismatchError, match=f"chunk {changed} of"):
        folded.put(75, sums(75), other[:76])
    assert not list((tmp_path / "pass").glob("chunk-*"))


def test_digests_that_are_gone_are_missed(tmp_path):
    folded = FoldedChunks(tmp_path / "pass", {}, ["x"] * 100)
    for number in range(80):
        folded.put(number, sums(number), list(range(number + 1)))
        if number < 79:
            folded.fold()
    (tmp_path / "pass" / "digests.safetensors").unlink()
    with pytest.raises(InputError, match="keep: must hold the digests"):
        folded.fold()
