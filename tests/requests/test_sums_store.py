"""Stored sums: against a float64 loop, stopped and resumed, in shards, with requests that add up to the bit."""

import json
import os
from dataclasses import replace

import pytest
import torch

import expunge
from expunge import fisher
from expunge.errors import InputError, MismatchError
from expunge.fisher import FisherSums, chunks
from expunge.requests import request as carrying
from expunge.requests import summing
from expunge.requests.grouping import group_rows
from expunge.requests.prepared import prepare
from expunge.requests.request import fulfil, summing_of
from expunge.requests.settings import Settings
from expunge.requests.summing import Rest, folded
from expunge.requests.sums_building import build, merge
from expunge.requests.sums_store import opened
from expunge.requests.verifying import verify
from tests.reference import fisher as fisher_loop
from tests.requests.small import MASK, TASK, request, write_task


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    """So that even these data have many: two batches of four samples each."""
    monkeypatch.setattr(summing, "BATCHES", 2)


def built(folder, name="store", shard=(1, 1), by=None, asked=None, **others):
    prepared = prepare(asked or request(folder, out="unused"))
    others = {"batch_size": 4} | others
    build(folder / name, replace(summing_of(prepared), **others), group_rows(prepared.task, by), shard)
    return folder / name


def contents(folder):
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if path.name != ".lock"}


def close(sums, expected):
    for name, total in expected.items():
        torch.testing.assert_close(sums[name], total, rtol=1e-4, atol=1e-6 * float(total.max()))


@pytest.mark.parametrize("by", ["class", "rows"])
def test_the_sums_are_those_of_a_loop_over_samples(by, tmp_path):
    prepared = prepare(request(tmp_path, out="unused"))
    with opened(built(tmp_path, by=by)) as store:
        assert len(store.header.groups) == (4 if by == "class" else 10)
        for what, rows in [("total", range(120)), ("group-1", store.grouping.rows(1))]:
            x, y = (torch.stack([torch.as_tensor(prepared.task.dataset[row][part]) for row in rows]) for part in (0, 1))
            stored = store.sums(what)
            assert stored.count == len(rows)
            close(stored.high, fisher_loop(prepared.model, (x, y)))


def test_the_sums_are_those_of_by_group_to_the_bit(tmp_path):
    """One path: what a store holds is what `fisher.by_group` returns."""
    prepared = prepare(request(tmp_path, out="unused"))
    labels = group_rows(prepared.task).group
    groups = fisher.by_group(prepared.model, prepared.task.train, labels, batch_size=4, batches_per_chunk=2)
    with opened(built(tmp_path)) as store:
        for name, sums in groups.items():
            stored = store.sums(f"group-{name}")
            assert stored.count == sums.count and all(torch.equal(stored.high[key], value) for key, value in sums.sums.items())
        total = FisherSums.merge(groups.values())
        assert all(torch.equal(store.sums("total").high[key], value) for key, value in total.sums.items())


def test_a_build_that_is_stopped_goes_on_where_it_was(tmp_path, monkeypatch):
    whole = contents(built(tmp_path, "whole"))
    prepared = prepare(request(tmp_path, out="unused"))
    passes = []
    plain = chunks.summed

    def failing(model, data, *others):
        if len(passes) in (2, 7, 12):
            passes.append(None)
            raise KeyboardInterrupt
        passes.append(tuple(int(label) for _, labels in data for label in labels))
        return plain(model, data, *others)

    monkeypatch.setattr(chunks, "summed", failing)
    for _ in range(3):
        with pytest.raises(KeyboardInterrupt):
            built(tmp_path)
    built(tmp_path)
    (tmp_path / "store" / "pass-left").mkdir()  # by one that was killed after it had stored all
    built(tmp_path)
    done = [labels for labels in passes if labels is not None]
    assert len(done) == 16 and sum(map(len, done)) == prepared.task.rows.samples  # every chunk, and every sample, once
    assert contents(tmp_path / "store") == whole


def test_shards_are_merged_to_what_one_build_stores(tmp_path):
    whole = contents(built(tmp_path, "whole"))
    shards = [built(tmp_path, f"shard{number}", (number, 3)) for number in (1, 2, 3)]
    merge(shards, tmp_path / "merged")
    assert contents(tmp_path / "merged") == whole
    with pytest.raises(InputError, match="must be complete: run `expunge fisher build` to its end, or merge"):
        fulfil(request(tmp_path, sums=shards[0]))
    assert merge(shards, tmp_path / "merged").complete and contents(tmp_path / "merged") == whole  # the same command again
    other = built(tmp_path, "other-batches", (1, 2), batch_size=8)
    with pytest.raises(MismatchError, match="out: .* holds another store than that of these shards"):
        merge([other], tmp_path / "merged")
    assert contents(tmp_path / "merged") == whole
    with pytest.raises(InputError, match="stores: must be a folder that `expunge fisher build` wrote"):
        merge([tmp_path], tmp_path / "other")
    with opened(shards[1]), pytest.raises(InputError, match="stores: must not be in use"):
        merge(shards, tmp_path / "other")
    assert not (tmp_path / "other").exists()


def test_a_folder_that_has_some_shards_is_completed_without_summing_them_again(tmp_path, monkeypatch):
    whole = contents(built(tmp_path, "whole"))
    built(tmp_path, "store", (2, 3))
    counts, plain = [], chunks.summed
    monkeypatch.setattr(chunks, "summed", lambda *args: counts.append(plain(*args)[1]) or plain(*args))
    built(tmp_path, "store")
    assert sum(counts) == 90  # of 120: a class of 30 was there
    assert contents(tmp_path / "store") == whole


def test_a_stopped_build_does_not_go_on_with_another_version_of_torch(tmp_path, monkeypatch):
    """Its sums may differ in their last bits."""
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(chunks, "summed", lambda *args: (_ for _ in ()).throw(KeyboardInterrupt))
        built(tmp_path)
    (listing,) = (tmp_path / "store").glob("pass-*/listing.json")
    listing.write_text(json.dumps(json.loads(listing.read_text()) | {"torch": "1.0"}))
    told = "out: .* belongs to a pass with another torch: 1.0 there and .* here; a build that was stopped goes on"
    with pytest.raises(MismatchError, match=told):
        built(tmp_path)


@pytest.mark.parametrize("stop", [OSError(28, "No space left on device", "store/x"), KeyboardInterrupt()])
def test_a_request_that_is_done_does_not_look_undone_when_its_store_cannot_be_changed(stop, tmp_path, monkeypatch):
    asked = request(tmp_path, sums=built(tmp_path))
    whole = contents(tmp_path / "store")

    def stopped(*arguments):
        raise stop

    done = "out: the request is done, but its samples are still in .*store;"
    with monkeypatch.context() as patched, pytest.raises(type(stop), match=done):
        patched.setattr(carrying, "take_out", stopped)
        fulfil(asked)
    assert contents(tmp_path / "store") == whole
    assert fulfil(asked).number == 1 and contents(tmp_path / "store") != whole


@pytest.mark.parametrize("earlier", ["expunge sums 1", "expunge sums 2"])
def test_a_store_of_an_earlier_version_is_refused(earlier, tmp_path):
    store = built(tmp_path)
    content = json.loads((store / "store.json").read_bytes())
    (store / "store.json").write_text(json.dumps(content | {"kind": earlier}))
    before = contents(store)
    for ask in (lambda: fulfil(request(tmp_path, sums=store)), lambda: built(tmp_path)):
        with pytest.raises(InputError, match="it is of an earlier version of expunge: build it anew, in a new folder"):
            ask()
    assert contents(store) == before


def test_a_mask_by_stored_sums_is_that_of_passes(tmp_path):
    fulfil(request(tmp_path, "0-9", "direct"))
    fulfil(request(tmp_path, "0-9", "stored", sums=built(tmp_path)))
    direct, stored = (expunge.Patch.load(tmp_path / out / "edit.safetensors") for out in ("direct", "stored"))
    assert all(torch.equal(edit.indices, stored.edits[name].indices) for name, edit in direct.edits.items())


def test_a_whole_class_needs_no_pass(tmp_path, monkeypatch):
    store = built(tmp_path)
    asked = request(tmp_path, "label=1", "stored", sums=store)
    monkeypatch.setattr(chunks, "summed", lambda *args: pytest.fail("a pass was made"))
    fulfil(asked)


def test_a_request_makes_a_pass_over_its_samples_alone(tmp_path, monkeypatch):
    store, seen, plain = built(tmp_path), [], chunks.summed

    def counted(*args):
        sums, count = plain(*args)
        seen.append(count)
        return sums, count

    monkeypatch.setattr(chunks, "summed", counted)
    fulfil(request(tmp_path, "0-9", "stored", sums=store))
    assert sum(seen) == 10


ORDERS = [("0-4", "label=2", "7,9,33"), ("7,9,33", "0-4", "label=2"), ("label=2", "0-4,7,9,33")]
ALL = ",".join(map(str, sorted({*range(5), *range(2, 120, 4), 7, 9, 33})))


@pytest.mark.parametrize("order, by", [(ORDERS[0], "class"), (ORDERS[1], "class"), (ORDERS[2], "rows")])
def test_requests_in_any_order_end_in_the_same_weights_to_the_bit(order, by, tmp_path):
    several, one = built(tmp_path, "several-sums", by=by), built(tmp_path, "one-sums", by=by)
    for forget in order:
        receipt = fulfil(request(tmp_path, forget, "several", sums=several))
    together = fulfil(request(tmp_path, ALL, "one", sums=one))
    assert receipt.weights_after == together.weights_after
    with opened(several) as first, opened(one) as second:  # and the stores lack the same
        assert len(first.header.dropped) == len(order)
        for what in ("total", "group-1", "group-2"):
            mine, theirs = first.sums(what), second.sums(what)
            assert (mine is None) == (theirs is None)
            if mine is not None:
                assert all(
                    torch.equal(mine.high[name], theirs.high[name]) and torch.equal(mine.low[name], theirs.low[name]) for name in mine.high
                )
    assert all(finding.fits for finding in verify(tmp_path / "several" / "receipt.json", task=tmp_path / "mytask.py"))


def test_after_a_request_the_store_lacks_its_samples(tmp_path):
    store = built(tmp_path)
    prepared = prepare(request(tmp_path, out="unused"))
    fulfil(request(tmp_path, "label=1", "out", sums=store))
    fulfil(request(tmp_path, "0,4,8", "out", sums=store))
    kept = [row for row in range(120) if row % 4 != 1 and row not in (0, 4, 8)]
    x, y = (torch.stack([torch.as_tensor(prepared.task.dataset[row][part]) for row in kept]) for part in (0, 1))
    with opened(store) as left:
        total = left.sums("total")
        assert total.count == len(kept) and left.sums("group-1") is None and left.sums("group-0").count == 27
        close(total.high, fisher_loop(prepared.model, (x, y)))
    assert not [name for name in os.listdir(store) if name.startswith("group-1.")]
    assert sorted(os.listdir(store)) == sorted([*json.loads((store / "store.json").read_bytes())["files"], "store.json", ".lock"])


def test_killed_between_the_folder_and_the_store_the_same_command_ends_both(tmp_path, monkeypatch):
    store = built(tmp_path)
    asked = request(tmp_path, "0-9", sums=store)
    with monkeypatch.context() as patch:
        patch.setattr("expunge.requests.request.take_out", lambda *args: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            fulfil(asked)
    first = fulfil(asked)
    with opened(store) as left:
        assert left.header.dropped == (first.commitments,) and left.sums("total").count == 110


def test_sums_come_back_to_the_bit():
    generator = torch.Generator().manual_seed(0)
    whole = FisherSums({"w": torch.rand(20_000, generator=generator, dtype=torch.float64) ** 8}, 9, "empirical", "d")
    part = replace(whole, sums={"w": whole.sums["w"] * torch.rand(20_000, generator=generator, dtype=torch.float64)}, count=4)
    rest = Rest.without(whole, part)
    assert rest.low["w"].any() and rest.count == 5
    assert torch.equal(rest.plus(part, whole).sums["w"], whole.sums["w"])
    assert not torch.equal(rest.high["w"] + part.sums["w"], whole.sums["w"])  # which is what `low` is for
    assert folded([whole]).count == 9


@pytest.mark.parametrize(
    "settings, told",
    [
        (Settings("finetune"), "sums: stored sums are for fisher-mask"),
        (Settings(), "sums: stored sums are for fisher-mask"),
        (Settings("fisher-mask-released"), "found kind=batch"),
        (Settings("fisher-mask", ("kind=expected", "tuning=None")), "holds sums of the kind empirical"),
    ],
)
def test_settings_that_stored_sums_are_not_for(settings, told, tmp_path):
    store = built(tmp_path)
    before = contents(store)
    with pytest.raises((InputError, MismatchError), match=told):
        fulfil(request(tmp_path, settings=settings, sums=store))
    assert contents(store) == before and not (tmp_path / "out").exists()


def test_the_threads_of_a_request_are_its_own(tmp_path):
    """Those of the store are for the sums alone; a replay uses both."""
    store = built(tmp_path, threads=2)
    receipt = fulfil(request(tmp_path, settings=MASK, sums=store))
    settings = json.loads((tmp_path / "out" / "settings.json").read_bytes())
    assert (settings["threads"], settings["sums_threads"], receipt.code.threads) == (1, 2, 1)
    assert all(finding.fits for finding in verify(tmp_path / "out" / "receipt.json", task=tmp_path / "mytask.py"))


def test_a_store_of_other_weights_or_data_is_refused(tmp_path):
    from safetensors.torch import load_file, save_file

    store = built(tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    save_file(state | {"0.bias": state["0.bias"] + 1}, tmp_path / "other.safetensors")
    with pytest.raises(MismatchError, match="is a store of other weights"):
        fulfil(replace(request(tmp_path, sums=store), weights=tmp_path / "other.safetensors"))
    write_task(tmp_path, TASK.replace("points(120, 1)", "points(120, 8)"))
    with pytest.raises(MismatchError, match="is a store of other training data"):
        fulfil(request(tmp_path, sums=store))
    with pytest.raises(MismatchError, match="holds sums of other weights, data or settings"):
        built(tmp_path)
    assert not (tmp_path / "out").exists()


def test_a_store_that_lacks_other_samples_is_refused(tmp_path):
    store = built(tmp_path)
    fulfil(request(tmp_path, "0-9", "one", sums=store))
    with pytest.raises(MismatchError, match="lacks samples of other requests"):
        fulfil(request(tmp_path, "0-9", "two", sums=store))


@pytest.mark.parametrize("name", ["store.json", "total.0.safetensors", "rows.0.safetensors", "group-2.0.safetensors"])
def test_a_tampered_store_is_refused(name, tmp_path):
    store = built(tmp_path)
    content = bytearray((store / name).read_bytes())
    content[len(content) // 2] ^= 1
    (store / name).write_bytes(content)
    with pytest.raises(InputError, match="sums: must be "):
        fulfil(request(tmp_path, sums=store))
    assert not (tmp_path / "out").exists()


def test_two_at_once_and_strange_folders_are_refused(tmp_path):
    store = built(tmp_path)
    with opened(store), pytest.raises(InputError, match="sums: must not be in use"):
        fulfil(request(tmp_path, sums=store))
    with pytest.raises(InputError, match="out: must be a folder that is new, empty, or holds a store"):
        built(tmp_path, ".")
    with pytest.raises(InputError, match="sums: must be a folder that `expunge fisher build` wrote"):
        fulfil(request(tmp_path, sums=tmp_path))
