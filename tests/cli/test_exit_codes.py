"""How `expunge bench` ends tells whether there are results, and only what a method does to a cell is kept as one."""

import errno
import json
import subprocess
import sys
from dataclasses import dataclass, replace

import pytest
import torch

from expunge.cli import commands as cli
from expunge.errors import DivergedError, InputError, ModelError
from expunge.experiments import profiles, results
from expunge.experiments.networks import original
from expunge.experiments.runner import run
from expunge.experiments.worker import main, read_work, run_work
from expunge.methods import METHODS
from tests.experiments.tiny import TINY, place, tasks, write_work


@pytest.fixture(autouse=True)
def tiny(monkeypatch):
    monkeypatch.setitem(profiles.PROFILES, "smoke", TINY)


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bench")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(profiles.PROFILES, "smoke", TINY)
        assert cli.main(["bench", "run", "table1", "--methods", "finetune", "--jobs", "1", "--out", str(folder)]) == 0
    return folder


def stored(folder):
    return [json.loads(path.read_bytes()) for path in folder.rglob("cells/*.json")]


@pytest.mark.parametrize("jobs", [1, 2])
@pytest.mark.slow
def test_where_data_are_missing_a_run_ends_with_one(jobs, tmp_path, capfd):
    asked = ["bench", "run", "table1", "--models", "cifar100/resnet8", "--methods", "finetune", "--jobs", str(jobs)]
    assert cli.main([*asked, "--data", str(tmp_path / "nowhere"), "--out", str(tmp_path / "out")]) == 1
    told = capfd.readouterr()
    assert told.out.startswith("0 of 2 cells done") and told.err.endswith("expunge: 2 of 2 cells have no result: see above why\n")
    assert "no data" in told.err and "Traceback" not in told.err


def test_where_data_are_missing_the_runner_alone_ends_with_one(tmp_path):
    asked = tasks("table1", ("finetune",), replace(TINY, models=("cifar100/resnet8",), validation=0.0))
    here = replace(place(tmp_path / "out"), data=str(tmp_path))
    assert main([str(write_work(tmp_path / "cells.json", asked, here))]) == 1


def test_a_method_that_refuses_has_a_result(out, tmp_path):
    asked = [task for task in tasks("table5", ("tf-idf-mask",)) if task.cell.scenario.get("remain_count") == 0]
    here = replace(place(tmp_path), models=out / "models")
    assert main([str(write_work(tmp_path / "cells.json", asked, here))]) == 0


@dataclass(frozen=True)
class Halving:
    def __call__(self, model, forget, remain, run):
        with torch.no_grad():
            model.classifier.weight.mul_(0.5)
        run.after_epoch(0)


@pytest.mark.slow
def test_a_method_that_the_processes_do_not_know_has_no_result(out, tmp_path, monkeypatch, capfd):
    """Afterwards it can be run where it is known: nothing false was kept."""
    monkeypatch.setitem(METHODS, "halving", Halving)
    (tmp_path / "models").symlink_to(out / "models")
    asked = ["bench", "run", "table1", "--methods", "halving", "--out", str(tmp_path)]
    assert cli.main([*asked, "--jobs", "2"]) == 1
    told = capfd.readouterr()
    assert told.out.startswith("1 of 2 cells done") and "Traceback" not in told.err
    rule = "method: must be in METHODS of the process that runs the cell"
    assert any(line.startswith("BROKEN ") and rule in line and line.endswith("found halving") for line in told.err.splitlines())
    assert {each["cell"]["method"]["name"] for each in stored(tmp_path)} == {"retrain"}
    assert cli.main([*asked, "--jobs", "1"]) == 0 and {each["error"] for each in stored(tmp_path)} == {None}


def wrapped(error):
    try:
        raise error
    except BaseException as cause:
        raise ModelError("model: must be something copy.deepcopy can copy") from cause


def unwrapped(error):
    raise error


OF_THE_MACHINE = {
    "memory": MemoryError(),
    "memory of a GPU": torch.OutOfMemoryError("CUDA out of memory"),
    "memory, as torch says it": RuntimeError("[enforce fail at alloc_cpu.cpp:119] DefaultCPUAllocator: can't allocate memory"),
    "disk": OSError(errno.ENOSPC, "No space left on device"),
    "module": ModuleNotFoundError("No module named 'scipy'"),
}


@pytest.mark.parametrize("raised", [unwrapped, wrapped])
@pytest.mark.parametrize("name", OF_THE_MACHINE)
def test_what_is_not_the_methods_doing_is_no_result(name, raised, out, tmp_path, monkeypatch):
    @dataclass(frozen=True)
    class Unlucky:
        def __call__(self, model, forget, remain, run):
            raised(OF_THE_MACHINE[name])

    monkeypatch.setitem(METHODS, "unlucky", Unlucky)
    here, lines = replace(place(tmp_path), models=out / "models"), []
    assert run(tasks("table1", ("unlucky",)), here, say=lines.append) == 1
    assert sum(line.startswith("BROKEN ") for line in lines) == 1
    assert {each["cell"]["method"]["name"] for each in stored(tmp_path)} == {"retrain"}


def test_ctrl_c_within_a_method_is_no_result(out, tmp_path, monkeypatch):
    @dataclass(frozen=True)
    class Interrupted:
        def __call__(self, model, forget, remain, run):
            raise KeyboardInterrupt

    monkeypatch.setitem(METHODS, "interrupted", Interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(tasks("table1", ("interrupted",)), replace(place(tmp_path), models=out / "models"))
    assert "interrupted" not in {each["cell"]["method"]["name"] for each in stored(tmp_path)}


def test_settings_that_a_method_does_not_have_are_no_result(out, tmp_path):
    """As of a list of cells that another version wrote."""
    asked = [task for task in tasks("table1", ("finetune",)) if task.cell.method["name"] == "finetune"]
    asked = [replace(task, cell=replace(task.cell, method={**task.cell.method, "newer": 1})) for task in asked]
    lines = []
    assert run(asked, replace(place(tmp_path), models=out / "models"), say=lines.append) == 1
    assert lines[0].startswith("BROKEN ") and stored(tmp_path) == []


@pytest.mark.parametrize("error", [RuntimeError("a defect"), MemoryError(), ImportError("no module"), InputError("rate", "no")])
def test_a_training_that_breaks_costs_its_own_cells_alone(error, tmp_path, monkeypatch):
    from expunge.experiments import networks as models

    train, asked, lines = models.train_networks, tasks("table1", ("finetune",)) + tasks("table3", ("finetune",)), []
    broken = original(asked[-1].cell).digest

    def breaking(*arguments, **others):
        if arguments[3][0].name == broken:
            raise error
        return train(*arguments, **others)

    monkeypatch.setattr(models, "train_networks", breaking)
    count = run(asked, place(tmp_path), say=lines.append)
    assert 0 < count < len(asked) and sum(line.startswith("BROKEN ") for line in lines) == count
    assert len(stored(tmp_path)) == len(asked) - count and {each["error"] for each in stored(tmp_path)} == {None}


def test_a_training_that_diverged_for_want_of_memory_is_no_result(tmp_path, monkeypatch):
    def diverging(*arguments, **others):
        try:
            raise MemoryError
        except MemoryError as error:
            raise DivergedError("not finite") from error

    monkeypatch.setattr("expunge.experiments.networks.train_networks", diverging)
    assert run(tasks("table1", ("finetune",)), place(tmp_path)) == 2 and stored(tmp_path) == []


@pytest.mark.parametrize("do", ["table", "list", "report"])
@pytest.mark.parametrize("there", [False, True])
def test_a_folder_without_results_is_refused(do, there, tmp_path, capsys):
    folder = tmp_path / "mistyped"
    if there:
        folder.mkdir()
    assert cli.main(["bench", do, "--out", str(folder)]) == 2
    told = capsys.readouterr()
    assert told.out == "" and str(folder) in told.err and told.err.count("\n") == 1 and "result" in told.err
    assert folder.exists() == there and not (there and list(folder.iterdir()))


def test_the_folder_where_nothing_has_run_yet_can_be_listed(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["bench", "list", "table1"]) == 0 and "0 of " in capsys.readouterr().out


def test_another_profile_of_the_folder_is_named(out, capsys):
    assert cli.main(["bench", "table", "table1", "--profile", "paper", "--out", str(out)]) == 2
    assert capsys.readouterr().err.startswith("expunge: out: must be a folder with results of the profile paper in its paper/cells")


def test_a_table_in_part_is_shown_and_one_with_nothing_in_it_says_so(out, capsys):
    asked = ["--methods", "finetune", "--out", str(out), "--format", "text"]
    assert cli.main(["bench", "table", "table1", "table3", *asked]) == 0 and "not run" in capsys.readouterr().out
    assert cli.main(["bench", "table", "table4", *asked]) == 1 and "not run" in capsys.readouterr().out


def test_a_process_that_is_killed_is_told(tmp_path, monkeypatch):
    from types import SimpleNamespace

    start = subprocess.Popen
    program = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
    killed = SimpleNamespace(Popen=lambda command, **others: start([sys.executable, "-c", program]), PIPE=subprocess.PIPE)
    monkeypatch.setattr("expunge.experiments.processes.subprocess", killed)
    lines = []
    work = read_work(write_work(tmp_path / "cells.json", tasks("table1", ("finetune",)), place(tmp_path), jobs=2))
    assert run_work(work, lines.append) == 2
    assert lines == ["a process was ended by SIGKILL; the same command does what is left"] * 2


def test_a_network_killed_before_its_note_was_written_is_finished(tmp_path):
    """After the weights, before the note: the state, which is removed last, tells that there is something left to do."""
    from expunge.experiments import networks as models

    asked, here = tasks("table1", ("finetune",)), place(tmp_path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(models, "write_json", lambda *arguments: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            run(asked, here)
    spec = original(asked[0].cell)
    assert here.store.path(spec).exists() and not here.store.holds(spec)
    before = here.store.path(spec).read_bytes()
    assert run(asked, here) == 0 and here.store.holds(spec)
    assert here.store.path(spec).read_bytes() == before and not list(here.models.glob("*.training.safetensors"))
    assert (here.models / f"{spec.digest}.spec.json").exists() and len(results.load(here.folder)) == len(asked)
