"""The runner: every cell once, whatever happens to it and however many work at it."""

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from expunge.errors import DivergedError, InputError
from expunge.experiments import results, runner
from expunge.experiments.networks import named, original, retrained
from expunge.experiments.plans import EXPERIMENTS, entries
from expunge.experiments.runner import run
from expunge.experiments.worker import main, read_work, run_work
from expunge.methods import METHODS
from expunge.report.formats import comma_separated, markdown
from expunge.report.paper_tables import empty, tables
from tests.experiments.tiny import FEW, TINY, place, tasks, write_work

ALONE = """
import sys
for name in ("rich", "tyro", "matplotlib", "sklearn", "scipy"):
    sys.modules[name] = None
from expunge.experiments.worker import main
sys.exit(main(sys.argv[1:]))
"""


def found_in(here):
    return {result.digest: result for result in results.load(here.folder)}


def table_of(here, experiment, methods=FEW):
    members = entries(EXPERIMENTS[experiment], TINY, listed=methods)
    return tables(EXPERIMENTS[experiment], members, found_in(here))


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """Table 1 of a few methods, run without disturbance."""
    here = place(tmp_path_factory.mktemp("bench"))
    lines = []
    assert run(tasks("table1"), here, say=lines.append) == 0
    return here, lines


def test_results_hold_what_was_promised(done):
    here, _ = done
    fisher = next(
        each for each in found_in(here).values() if each.cell.label.startswith("digits resnet8 category label=0 fisher-mask ratio")
    )
    assert [epoch.epoch for epoch in fisher.history] == [0, 1, 2]
    assert fisher.best is not None and fisher.best.on == "validation"
    assert fisher.masked is not None and fisher.masked.remain == fisher.history[0].remain
    assert fisher.last == fisher.history[-1] and fisher.stability is not None
    assert len(fisher.class_accuracies["after"]) == 10 and sum(fisher.predicted["after"]) == pytest.approx(1)
    assert fisher.masked_share is not None and 0 < max(fisher.masked_share.values()) <= 1
    assert fisher.retrained is not None and fisher.retrained.forget == 0
    assert fisher.weights["before"] != fisher.weights["after"] != fisher.weights["retrained"]
    assert fisher.experiments == ("table1",) and fisher.error is None and fisher.attack is None
    scored = max(fisher.history, key=lambda each: each.validation_remain / (1 + each.validation_forget))
    assert fisher.best.epoch == scored.epoch


def test_the_reference_is_its_own_best(done):
    here, _ = done
    reference = next(each for each in found_in(here).values() if each.cell.method["name"] == "retrain")
    assert reference.agreement == 1 and reference.divergence == 0
    assert reference.best.epoch == TINY.training["epochs"]


def test_what_exists_is_skipped(done):
    here, _ = done
    before = {path: path.stat().st_mtime_ns for path in here.folder.rglob("*.json")}
    lines = []
    assert run(tasks("table1"), here, say=lines.append) == 0
    assert lines == [] and {path: path.stat().st_mtime_ns for path in here.folder.rglob("*.json")} == before


def test_a_shared_cell_is_told_who_else_needs_it(done):
    here, _ = done
    asked = [replace(task, experiments=("fig-ratio",)) for task in tasks("table1")[:1]]
    lines = []
    run(asked, here, say=lines.append)
    assert lines == [] and found_in(here)[asked[0].cell.digest].experiments == ("fig-ratio", "table1")
    found = json.loads(results.path_of(here.folder, asked[0].cell.digest).read_bytes())
    results.path_of(here.folder, asked[0].cell.digest).write_text(json.dumps(found | {"experiments": ["table1"]}))


def test_networks_are_trained_once_and_shared(done):
    here, lines = done
    assert sum(line.startswith("trained") for line in lines) == 2
    assert len(list(here.models.glob("*.spec.json"))) == 2
    assert not list(here.models.glob("*.training.safetensors"))


@pytest.mark.slow
def test_killed_at_any_moment_the_table_is_the_same(done, tmp_path):
    """SIGKILL after random times, the whole group of processes; every file that is there is whole, and the next run goes on."""
    here, generator, killed = place(tmp_path), random.Random(0), 0
    asked = write_work(tmp_path / "cells.json", tasks("table1"), here)
    command = [sys.executable, "-m", "expunge.experiments.worker", str(asked)]
    for _ in range(60):
        runner = subprocess.Popen(command, stderr=subprocess.DEVNULL, start_new_session=True)
        progress = len(list(tmp_path.rglob("*.safetensors"))) + len(list(tmp_path.rglob("cells/*.json")))
        while runner.poll() is None:
            now = len(list(tmp_path.rglob("*.safetensors"))) + len(list(tmp_path.rglob("cells/*.json")))
            if now > progress and killed < 3:
                time.sleep(generator.uniform(0, 0.3))
                os.killpg(runner.pid, signal.SIGKILL)
                killed += 1
                break
            time.sleep(0.01)
        code = runner.wait()
        for path in tmp_path.rglob("cells/*.json"):
            results.read(path)
        if code == 0:
            break
    assert code == 0 and killed == 3
    assert comma_separated(table_of(here, "table1")) == comma_separated(table_of(done[0], "table1"))


@pytest.mark.slow
def test_two_runners_do_nothing_twice(tmp_path):
    here = place(tmp_path)
    asked = write_work(tmp_path / "cells.json", tasks("table1"), here)
    command = [sys.executable, "-m", "expunge.experiments.worker", str(asked)]
    runners = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    lines = [line for runner in runners for line in runner.communicate()[1].splitlines()]
    assert [runner.returncode for runner in runners] == [0, 0]
    did = [re.sub(r": [\d.]+ s.*", "", line) for line in lines if not line.startswith("trained")]
    assert sorted(did) == sorted(task.cell.label for task in tasks("table1"))
    assert sum(line.startswith("trained") for line in lines) == 2


@pytest.mark.slow
def test_jobs_are_processes_that_end_with_their_parent(done, tmp_path):
    """They share the work, and when the one that started them is killed they stop after the cell in hand."""
    here = replace(place(tmp_path), models=done[0].models)
    asked = write_work(tmp_path / "cells.json", tasks("table1"), here, jobs=2)
    command = [sys.executable, "-m", "expunge.experiments.worker", str(asked)]
    runner = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True)
    while not list(here.folder.glob("cells/*.json")):
        assert runner.poll() is None
        time.sleep(0.01)
    runner.kill()
    runner.wait()
    there = len(list(here.folder.glob("cells/*.json")))
    with runner.stderr:
        runner.stderr.read()  # ends when the last process that holds the pipe ends
    assert len(found_in(here)) <= there + 2
    assert run_work(read_work(asked), say=lambda line: None) == 0
    assert comma_separated(table_of(here, "table1")) == comma_separated(table_of(done[0], "table1"))


def test_how_networks_are_trained_is_told_to_the_processes(tmp_path, monkeypatch):
    asked = []

    def start(command, **others):
        asked.append(command)
        return subprocess.Popen([sys.executable, "-c", ""])

    monkeypatch.setattr("expunge.experiments.processes.subprocess", SimpleNamespace(Popen=start, PIPE=subprocess.PIPE))
    work = read_work(write_work(tmp_path / "cells.json", [], place(tmp_path), together=3, compiled=True, jobs=2))
    run_work(work, say=lambda line: None)
    places = []
    monkeypatch.setattr("expunge.experiments.worker.run", lambda tasks, place, *rest, **more: places.append(place) or 0)
    for command in asked:
        main(command[3:])
    assert [(here.store.together, here.store.compiled) for here in places] == [(3, True)] * 2
    elsewhere = read_work(write_work(tmp_path / "cells.json", [], place(tmp_path / "elsewhere"), together=3, compiled=True, jobs=2))
    run_work(elsewhere, say=lambda line: None)
    assert len({Path(command[3]).name for command in asked}) == 1 < len({command[3] for command in asked})


def test_a_bar_hears_what_processes_start_and_finish(done, tmp_path):
    here = replace(place(tmp_path), models=done[0].models)
    work = read_work(write_work(tmp_path / "cells.json", tasks("table1", ("finetune",)), here, jobs=2))
    lines, started = [], []
    assert run_work(work, lines.append, started.append) == 0
    assert sorted(started) == sorted(task.cell.label for task in work.tasks) == sorted(line.rpartition(":")[0] for line in lines)


def test_no_network_at_a_time_is_refused(tmp_path):
    with pytest.raises(InputError, match="together: must be at least 1; found 0"):
        run(tasks("table1", ("retrain",)), replace(place(tmp_path), together=0))


def test_the_training_goes_through_the_compiler_where_asked(tmp_path, monkeypatch):
    compiled = []
    monkeypatch.setattr(torch, "compile", lambda model: compiled.append(model) or model)
    run(tasks("table1", ("retrain",)), replace(place(tmp_path), compiled=True))
    assert len(compiled) == 2


@pytest.mark.slow
def test_the_runner_needs_torch_numpy_and_safetensors_alone(done, tmp_path):
    here, _ = done
    asked = write_work(tmp_path / "cells.json", tasks("fig-relearn", ("mask-classifier",)), here)
    command = [sys.executable, "-c", ALONE, str(asked)]
    finished = subprocess.run(command, capture_output=True, text=True)
    assert finished.returncode == 0, finished.stderr
    relearned = [each.relearn for each in found_in(here).values() if each.relearn is not None]
    assert len(relearned) == 2 and all(each.limit == 2 for each in relearned)


def test_a_method_that_says_no_is_a_result(done):
    here, _ = done
    asked = [task for task in tasks("table5", ("tf-idf-mask",)) if task.cell.scenario.get("remain_count") == 0]
    assert run(asked, here) == 0
    found = found_in(here)[asked[0].cell.digest]
    assert found.error is not None and "needs the data to keep" in found.error and found.final
    refused = [row for row in table_of(here, "table5", ("tf-idf-mask",))[0].rows if row.section == "no remain data"]
    assert {value.text for row in refused for value in row.values} == {"refused"}


def test_a_method_that_diverges_is_a_result(done, tmp_path, monkeypatch):
    @dataclass(frozen=True)
    class Exploding:
        def __call__(self, model, forget, remain, run):
            raise DivergedError("the loss is no longer finite")

    monkeypatch.setitem(METHODS, "exploding", Exploding)
    here = replace(place(tmp_path), models=done[0].models)
    assert run(tasks("table1", ("exploding",)), here) == 0
    row = next(row for row in table_of(here, "table1", ("exploding",))[1].rows if row.name == "exploding")
    assert {value.text for value in row.values} == {"diverged"}


def test_missing_data_say_so_and_are_looked_for_again(tmp_path):
    here, profile = replace(place(tmp_path), data=str(tmp_path / "nowhere")), replace(TINY, models=("cifar100/resnet8",), validation=0.0)
    asked = tasks("table1", ("finetune",), profile)
    lines = []
    assert run(asked, here, say=lines.append) == 0
    assert len(lines) == len(asked) and all("no data" in line for line in lines)
    found = found_in(here)[asked[0].cell.digest]
    assert found.error.startswith("no data") and not found.final
    members = entries(EXPERIMENTS["table1"], profile, listed=("finetune",))
    assert "no data" in markdown(tables(EXPERIMENTS["table1"], members, found_in(here)))
    again = []
    run(asked, here, say=again.append)
    assert len(again) == len(asked)


def test_a_defect_in_one_cell_does_not_cost_the_others(done, tmp_path, monkeypatch):
    @dataclass(frozen=True)
    class Broken:
        def __call__(self, model, forget, remain, run):
            raise RuntimeError("a defect")

    monkeypatch.setitem(METHODS, "broken", Broken)
    here, lines = replace(place(tmp_path), models=done[0].models), []
    assert run(tasks("table1", ("broken", "finetune")), here, say=lines.append) == 1
    (line,) = (line for line in lines if "BROKEN" in line)
    assert re.search(rf"RuntimeError\('a defect'\) \({re.escape(__file__)}, line \d+\)$", line), line
    assert len(found_in(here)) == 2  # Retrain and Finetune; the broken one left no result
    assert empty(table_of(here, "table1", ("broken", "finetune"))) > 0


def test_a_new_method_is_one_dataclass(done, monkeypatch):
    """It gets its row in every table, without an entry anywhere else, and in the page."""

    @dataclass(frozen=True)
    class Halving:
        """Halve all weights of the classifier."""

        factor: float = 0.5

        def __call__(self, model, forget, remain, run):
            with torch.no_grad():
                for parameter in model.classifier.parameters():
                    parameter.mul_(self.factor)
            run.after_epoch(0)

    monkeypatch.setitem(METHODS, "halving", Halving)
    here, _ = done
    for experiment in ("table1", "fig-relearn"):
        assert run(tasks(experiment, ("halving",)), here) == 0
        written = markdown(table_of(here, experiment, ("halving",)))
        assert "| Halving | " in written and "not run" not in written
    for experiment in ("table3", "table4", "table5"):
        assert "halving" in {entry.row for entry in entries(EXPERIMENTS[experiment], TINY)}


def test_a_network_from_elsewhere_is_adopted(done, tmp_path):
    here, cells = done[0], [task.cell for task in tasks("table1")]
    held, elsewhere = here.store, place(tmp_path)
    for spec, name in ((original(cells[0]), "digits-resnet8-original-seed1"), (retrained(cells[0]), "digits-resnet8-without0-seed1")):
        file = tmp_path / f"{name}.safetensors"
        file.write_bytes(held.path(spec).read_bytes())
        assert named(file, cells) == spec
        assert not elsewhere.store.holds(spec)
        elsewhere.store.adopt(file, spec)
    lines = []
    run([task for task in tasks("table1") if task.cell.method["name"] == "finetune"], elsewhere, say=lines.append)
    assert len(lines) == 1 and not lines[0].startswith("trained")
    assert next(iter(found_in(elsewhere).values())).before == next(iter(found_in(here).values())).before
    note = here.models / f"{spec.digest}.spec.json"
    told = note.read_bytes()
    assert held.adopt(file, spec) == held.path(spec) and note.read_bytes() == told and b"seconds" in told  # it is there already
    other = elsewhere.models.parent / "other.safetensors"
    other.write_bytes(held.path(original(cells[0])).read_bytes())
    before = {path: path.read_bytes() for path in elsewhere.models.iterdir() if path.is_file()}
    with pytest.raises(InputError, match="file: must not be another network than the one in the store, .*; found .*other.safetensors"):
        elsewhere.store.adopt(other, spec)
    assert {path: path.read_bytes() for path in elsewhere.models.iterdir() if path.is_file()} == before
    with pytest.raises(InputError, match="must hold a vgg16; found resnet8"):
        elsewhere.store.adopt(file, replace(original(cells[0]), network="vgg16"))
    with pytest.raises(InputError, match="must be called"):
        named("network.safetensors", cells)


def test_a_broken_result_file_is_named(tmp_path):
    path = results.path_of(tmp_path, "abc")
    path.parent.mkdir(parents=True)
    path.write_text("{}")
    with pytest.raises(InputError, match="abc.json must hold the result of a cell"):
        results.load(tmp_path)


def test_a_damaged_network_is_no_result(done, tmp_path):
    asked, here, lines = tasks("table1", ("finetune",)), place(tmp_path), []
    here.models.mkdir()
    for path in done[0].models.glob("*.safetensors"):
        (here.models / path.name).write_bytes(path.read_bytes())
    damaged = here.store.path(original(asked[0].cell))
    whole = damaged.read_bytes()
    damaged.write_bytes(whole[:1000])
    assert run(asked, here, say=lines.append) == len(asked)
    assert all(line.startswith("BROKEN ") and "must be a whole safetensors file" in line and damaged.name in line for line in lines)
    assert found_in(here) == {}
    damaged.write_bytes(whole)
    assert run(asked, here) == 0 and {result.error for result in found_in(here).values()} == {None}


@pytest.mark.slow
def test_a_damaged_state_of_a_training_is_no_result(tmp_path):
    asked, here, lines = tasks("table1", ("finetune",)), place(tmp_path), []
    here.models.mkdir()
    state = here.models / f"{original(asked[0].cell).digest}.training.safetensors"
    state.write_bytes(b"half a fi")
    assert run(asked, here, say=lines.append) == len(asked)
    assert sum(line.startswith("BROKEN ") and state.name in line for line in lines) == len(asked) and found_in(here) == {}
    state.unlink()
    assert run(asked, here) == 0 and len(found_in(here)) == len(asked)


def test_no_process_at_all_is_refused(tmp_path):
    with pytest.raises(InputError, match="cells: .*jobs is 0"):
        main([str(write_work(tmp_path / "cells.json", [], place(tmp_path), jobs=0))])


def test_a_result_that_could_not_be_read_again_is_not_stored(tmp_path, monkeypatch):
    def perform(cell, store):
        return results.Result(cell, cell.digest, 0.0, {}, {}, divergence=float("inf")), None

    monkeypatch.setattr(runner, "perform", perform)
    here, lines = place(tmp_path), []
    assert run(tasks("table1")[:1], here, say=lines.append) == 1
    assert lines[-1].startswith("BROKEN") and "divergence is Infinity" in lines[-1] and not found_in(here)
