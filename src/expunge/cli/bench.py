"""Run `expunge bench`: list, run, print, report or adopt. Heavy modules are imported only where they are used."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from expunge.cli.running import jobs_for, run_shown
from expunge.errors import InputError
from expunge.runtime.exits import uninterrupted
from expunge.storage.files import check_file, check_folder, shown_folder

if TYPE_CHECKING:
    from expunge.experiments.planned_cells import Entry
    from expunge.experiments.plans import Experiment
    from expunge.experiments.profiles import Profile
    from expunge.experiments.runner import Place, Task

OUT = "results"
Do = Literal["list", "run", "table", "report", "adopt"]


@dataclass(frozen=True)
class Bench:
    """What to do, and with which experiments in which size."""

    do: Do
    names: tuple[str, ...]
    profile: str
    seeds: tuple[int, ...]
    models: tuple[str, ...]
    methods: tuple[str, ...]
    only: tuple[str, ...]
    out: str
    data: str | None
    device: str | None
    jobs: int | None
    on: str
    compile: bool
    retrained: bool
    dry_run: bool
    cells: str | None
    format: str


def bench_command(
    do: Do,
    names: tuple[str, ...] = ("all",),
    /,
    profile: Literal["smoke", "paper"] = "smoke",
    seeds: tuple[int, ...] = (),
    models: tuple[str, ...] = (),
    methods: tuple[str, ...] = ("all",),
    only: tuple[str, ...] = (),
    out: str = OUT,
    data: str | None = None,
    device: str | None = None,
    jobs: int | None = None,
    on: Literal["processes", "ray"] = "processes",
    compile: bool = False,
    retrained: bool = True,
    dry_run: bool = False,
    cells: str | None = None,
    format: Literal["terminal", "text", "markdown", "latex", "csv"] = "terminal",
) -> Bench:
    """The paper's tables and figures, with its printed numbers beside ours. The same command resumes after a stop.

    Args:
        do: list experiments and how much of them is done; run them; print a table; write the report page; adopt trained networks.
        names: all, or experiments: table1 to table5, forget, fig-influence, -relearn, -schedule, -ratio, settings. For adopt: networks.
        profile: smoke: handwritten digits, minutes on a CPU; paper: CIFAR-10 and CIFAR-100, for a GPU.
        seeds: In place of the profile's.
        models: In place of the profile's, such as cifar10/vgg16; all but tables 1 and 2 take the first.
        methods: all, paper (those of the paper alone), names such as fisher-mask; of your own: package.module:Class, path/file.py:Class.
        only: Words that a cell's line must hold, such as seed=666, poisoned or fisher-mask-released.
        out: Folder; results are in its PROFILE/cells, networks in its models.
        data: Folder of the datasets; without it EXPUNGE_DATA, else ./data.
        device: cuda or cpu; without it what there is.
        jobs: Processes that share the work; without it one on a GPU, one per core on a CPU.
        on: processes of this machine, or the cells as tasks of a Ray cluster (RAY_ADDRESS, else this machine), which sees the folders.
        compile: Train networks through torch.compile: faster on a GPU, where many are to be trained.
        retrained: Train the networks to compare with. Without, cells use those that exist, and measures that need one may be missing.
        dry_run: Print what would run, and for how long; run nothing.
        cells: Write the cells to this file, for `python -m expunge.experiments.worker`.
        format: Of tables.
    """
    return Bench(do, names, profile, seeds, models, methods, only, out, data, device, jobs, on, compile, retrained, dry_run, cells, format)


def run_bench(options: Bench) -> int:
    """The exit code: 1 where a cell that was to be run, or every cell that was to be shown, has no result."""
    with uninterrupted():
        from expunge.experiments.plans import chosen, entries
        from expunge.experiments.profiles import profile_of
        from expunge.experiments.recalled import planned_or_stored
        from expunge.runtime.modes import check_seeds

    check_seeds("seeds", *options.seeds)
    profile = profile_of(options.profile, options.seeds, options.models)
    experiments = chosen(("all",) if options.do == "adopt" else options.names)
    if options.do in ("list", "table"):
        folder = Path(options.out) / options.profile
        asked = planned_or_stored(experiments, profile, options.only, options.methods, folder, _warn)
    else:
        asked = {experiment: entries(experiment, profile, options.only, options.methods) for experiment in experiments}
    if options.only and not any(asked.values()):
        raise InputError("only", "must be words of the line of a cell that is asked for", " ".join(options.only))
    does: dict[str, Callable[[Bench, Profile, dict[Experiment, list[Entry]]], int]] = {
        "list": _list,
        "run": _run,
        "table": _table,
        "adopt": _adopt,
    }
    return does[options.do](options, profile, asked)


def _warn(line: str) -> None:
    print(f"expunge: {line}", file=sys.stderr, flush=True)


def _place(options: Bench) -> Place:
    from expunge.experiments.runner import Place
    from expunge.runtime.modes import device_named

    out = Path(options.out)
    return Place(
        out / options.profile,
        out / "models",
        options.data,
        device_named(options.device),
        compiled=options.compile,
        retrained=options.retrained,
    )


def _tasks(asked: dict[Experiment, list[Entry]]) -> list[Task]:
    """Every cell once, with the experiments it belongs to."""
    from expunge.experiments.runner import Task

    tasks: dict[str, Task] = {}
    for experiment, members in asked.items():
        for entry in members:
            known = tasks.get(entry.cell.digest, Task(entry.cell))
            tasks[entry.cell.digest] = Task(entry.cell, tuple(dict.fromkeys((*known.experiments, experiment.name))))
    return list(tasks.values())


def _list(options: Bench, profile: Profile, asked: dict[Experiment, list[Entry]]) -> int:
    place = _place(options)
    if options.out != OUT and not any(Path(options.out).glob("*/cells")):
        raise InputError("out", "must be a folder of results, where something has been run; there are none", options.out)
    for experiment, members in asked.items():
        cells = {entry.cell.digest: entry.cell for entry in members}
        done = sum(place.done(cell) for cell in cells.values())
        print(f"{experiment.name:14} {experiment.title}: {done} of {len(cells)} cells done")
    print(f"profile {profile.name}: {', '.join(profile.models)}, seeds {', '.join(map(str, profile.seeds))}; {shown_folder(place.folder)}")
    return 0


def _run(options: Bench, profile: Profile, asked: dict[Experiment, list[Entry]]) -> int:
    with uninterrupted():
        from expunge.experiments.worker import Work
        from expunge.storage.codec import encode
        from expunge.storage.files import write_json

    if options.cells is not None:
        check_file("cells", options.cells)
    if not options.dry_run:
        check_folder("out", options.out)
    tasks, place = _tasks(asked), _place(options)
    work = Work(
        tasks=tuple(tasks),
        folder=str(place.folder),
        models=str(place.models),
        data=options.data,
        device=options.device,
        compiled=options.compile,
        retrained=options.retrained,
        jobs=jobs_for(place.device.type, options.jobs, options.on),
        on=options.on,  # type: ignore[arg-type]
    )
    if options.cells is not None:
        write_json(options.cells, encode(work))
    if options.dry_run:
        _print_estimates(tasks, place, work.jobs)
        return 0
    missing = run_shown(work)
    print(f"{len(tasks) - missing} of {len(tasks)} cells done; {shown_folder(place.folder)}")
    if missing:
        print(f"expunge: {missing} of {len(tasks)} cells have no result: see above why", file=sys.stderr, flush=True)
    return 1 if missing else 0


def _print_estimates(tasks: Sequence[Task], place: Place, jobs: int) -> None:
    from expunge.experiments.estimates import Estimates
    from expunge.experiments.runner import missing_networks
    from expunge.runtime.display import counted

    open_tasks = [task for task in tasks if not place.done(task.cell)]
    estimates = Estimates.of(place)
    networks = missing_networks((task.cell for task in open_tasks), place.store)
    for spec in networks:
        data = " ".join(map(str, spec.data.values()))
        print(f"would train {spec.dataset} {spec.network} {data} seed={spec.seed}: {_time(estimates.network(spec))}")
    for task in open_tasks:
        print(f"would run {task.cell.label}: {_time(estimates.cell(task.cell))}")
    seconds = [*map(estimates.network, networks), *(estimates.cell(task.cell) for task in open_tasks)]
    known = [estimate for estimate in seconds if estimate is not None]
    unknown = len(seconds) - len(known)
    trained = f"{counted(len(networks), 'network')} would be trained, and " if networks else ""
    print(f"{trained}{len(open_tasks)} of {counted(len(tasks), 'cell')} would run, in {counted(jobs, 'process', 'processes')}; ", end="")
    print(f"{len(tasks) - len(open_tasks)} are done already")
    if known:
        print(f"that takes about {_time(sum(known) / jobs)}" + (f" without the {unknown} of unknown time" if unknown else ""))
    if unknown:
        print("a time is unknown where nothing alike has run yet on such a device")
    print(f"nothing was run; without --dry-run the results are in {shown_folder(place.folder)}")


def _time(seconds: float | None) -> str:
    if seconds is None:
        return "time unknown"
    return f"{seconds:.1f} s" if seconds < 120 else f"{seconds / 60:.0f} min"


def _table(options: Bench, profile: Profile, asked: dict[Experiment, list[Entry]]) -> int:
    from expunge.report.formats import FORMATS, show
    from expunge.report.paper_tables import tables

    place = _place(options)
    if not any((place.folder / "cells").glob("*.json")):
        rule = f"must be a folder with results of the profile {options.profile} in its {options.profile}/cells; there are none"
        raise InputError("out", rule, options.out)
    printed, seen = [], 0
    for experiment, members in asked.items():
        there = {entry.cell.digest: place.result(entry.cell) for entry in members}
        results = {digest: result for digest, result in there.items() if result is not None}
        printed += tables(experiment, members, results)
        seen += len(results)
    if options.format != "terminal":
        print(FORMATS[options.format](printed), end="")
    elif sys.stdout.isatty():
        show(printed)
    else:
        print(FORMATS["text"](printed), end="")
    return 0 if seen else 1


def _adopt(options: Bench, profile: Profile, asked: dict[Experiment, list[Entry]]) -> int:
    from expunge.experiments.networks import named

    check_folder("out", options.out)
    store, cells = _place(options).store, [entry.cell for members in asked.values() for entry in members]
    for file in options.names:
        spec = named(file, cells)
        there = " already" if store.holds(spec) else ""
        print(f"{file} is{there} {store.adopt(file, spec)}")
    return 0
