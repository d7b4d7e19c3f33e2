"""Train the shadows that `expunge audit --shadows` asks for, or go on with them, before the audit that they are for."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from expunge.cli.running import jobs_for
from expunge.errors import InputError, MismatchError
from expunge.runtime.exits import on_one_line
from expunge.storage.files import check_folder
from expunge.validate import check_positive, check_whole

if TYPE_CHECKING:
    from expunge.cli.audit import Audit
    from expunge.experiments.shadow_work import Prepared, ShadowWork

SHADOWS = "shadows"  # in the folder of the audit
AT_ONCE = 8  # on a GPU, which small networks share


def check_options(options: Audit) -> None:
    """Options that are for shadows alone, and numbers that there can be."""
    if not options.shadows:
        for name in ("method", "set", "request", "seconds", "jobs", "at_once", "shadow_folder"):
            if getattr(options, name):
                raise InputError(name, "is for shadows: give their number, such as --shadows 64", getattr(options, name))
        if options.on != "processes":
            raise InputError("on", "is for shadows: give their number, such as --shadows 64", options.on)
        return
    check_whole("shadows", options.shadows, minimum=4, maximum=10**5)
    if options.shadows % 2:
        raise InputError("shadows", "must be even: two shadows share the candidates out", options.shadows)
    if options.seconds is not None:
        check_positive("seconds", options.seconds)
    for name in ("at_once", "jobs"):
        if getattr(options, name) is not None:
            check_whole(name, getattr(options, name), minimum=1)
    jobs_for("cpu", options.jobs, options.on)
    if options.on == "ray" and find_spec("ray") is None:
        raise InputError("on", "'ray' must be installed: pip install 'expunge[ray]'")
    if options.method is None and options.request is None:
        raise InputError("method", "must be how the audited network was made to forget, such as fisher-mask; or give --request FOLDER")


def planned(options: Audit, rows: Sequence[int], before: Any, device: str, policy: Any) -> tuple[ShadowWork, Prepared]:
    """The shadows, checked; nothing is written yet."""
    from expunge.experiments.shadow_running import check_plan
    from expunge.experiments.shadow_work import ShadowWork, prepare
    from expunge.storage.tensors import weights_digest

    if options.shadows < policy.shadows:
        raise InputError("shadows", f"must be {policy.shadows} or more (policy.shadows), fewer have no interval", options.shadows)
    method, given = _method(options, rows)
    folder = options.shadow_folder or str(Path(options.out) / SHADOWS)
    check_folder("shadow_folder", folder)
    work = ShadowWork(
        folder=folder,
        forget=tuple(rows),
        method=method,
        given=given,
        number=options.shadows,
        task=options.task,
        before=None if options.task is not None else options.before,
        dataset=options.dataset,
        data=options.data,
        size=options.size,
        at_once=options.at_once or (AT_ONCE if device == "cuda" else 1),
        device=options.device,
        threads=1 if options.task is None and options.dataset == "digits" else None,
    )
    prepared = prepare(work)
    check_plan(prepared)
    if prepared.ensemble.plan["network"] == weights_digest(before):
        rule = "model() must make a network with fresh weights, for shadows: it returns those of the original"
        raise InputError("task", rule, options.before)
    return work, prepared


def trained(options: Audit, work: ShadowWork, prepared: Prepared, device: str) -> bool:
    """Do what is left to do; whether all of it is done."""
    from expunge.experiments.shadow_running import PROGRESS, run_shadows

    done_so_far = re.compile(PROGRESS.format(r"\d+", r"\d+", r"\w+"))

    def say(line: str) -> None:
        if not options.quiet or not done_so_far.fullmatch(line):
            print(on_one_line(line), file=sys.stderr, flush=True)

    if prepared.done():
        return True
    if not options.quiet:
        say(prepared.cost())
    progress = False if options.quiet else None
    broken = run_shadows(work, say, options.seconds, jobs_for(device, options.jobs), options.on, progress)
    if not prepared.done():
        why = "does what is left; see above what broke" if broken else "goes on, and audits when all are done"
        print(f"{prepared.left()}; the same command {why}", file=sys.stderr, flush=True)
    return prepared.done()


def _method(options: Audit, rows: Sequence[int]) -> tuple[str, tuple[str, ...]]:
    """The method and its settings as given, or as a folder of requests has them."""
    if options.request is None:
        assert options.method is not None  # checked before
        return options.method, options.set
    from expunge.requests.folder import SETTINGS, read_state
    from expunge.storage.documents import excerpt, read_json

    folder = Path(options.request)
    state = read_state(folder)
    if state is None:
        raise InputError("request", "must be a folder that `expunge unlearn` made", options.request)
    try:
        content = read_json(folder / SETTINGS)
        method, given = str(content["method"]), tuple(map(str, content["given"]))
    except (ValueError, KeyError, TypeError) as error:
        raise InputError("request", f"must hold {SETTINGS} as it was written ({excerpt(error)})", options.request) from error
    for name, value, kept in (("method", options.method, method), ("set", options.set or None, given)):
        if value is not None and value != kept:
            raise MismatchError(f"{name}: must be that of the request in {folder}, {kept}; found {value}")
    if state.openings is not None and state.ids != set(rows):
        differ = len(state.ids ^ set(rows))
        raise MismatchError(f"forget: must be the {len(state.ids)} samples that were forgotten in {folder}; {differ} differ")
    return method, given
