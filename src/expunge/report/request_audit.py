"""Audit what a deletion request made, and add the page and the numbers to its folder."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from expunge.audit.auditing import audit
from expunge.audit.keeping import Folder, computed
from expunge.audit.report import CARD
from expunge.audit.settings import Settings
from expunge.errors import ExpungeError, InputError
from expunge.report.audit_files import PAGE
from expunge.report.audit_page import audit_page
from expunge.requests.folder import AUDIT as NUMBERS
from expunge.requests.request import told
from expunge.requests.task import Task
from expunge.requests.weights import digest_of, load_weights, shared_names, weights_of
from expunge.requests.working import AUDIT
from expunge.requests.writing import Made
from expunge.storage.codec import encode
from expunge.storage.files import write_bytes, write_json


def of_task(task: Task, path: str, argument: str, device: Any) -> tuple[nn.Module, str]:
    """A network of the task's with the weights of a file, apart from the task's own; and their digest, as a receipt has it."""
    network = copy.deepcopy(task.model)
    try:
        names = load_weights(path, network)
    except InputError as error:
        raise InputError(argument, error.rule, error.found) from error
    digest = digest_of(weights_of(network, names), shared_names(network))
    return network.to(device), digest


def auditing(retrained: Sequence[nn.Module] = (), progress: bool | None = None) -> Callable[[Made, Path], Mapping[str, Any]]:
    """What `requests.fulfil` takes as `examine`: the audit, its page, and its verdict with the reasons for the receipt.

    Its lines are told, and kept in the log, like all of a request. Where no audit can be made, as with fewer than 20 samples, the receipt
    says why; the request stands.
    """

    def examine(made: Made, folder: Path) -> Mapping[str, Any]:
        prepared, task = made.prepared, made.prepared.task
        done = f"expunge unlearn, {made.outcome.method if isinstance(made.outcome.method, str) else repr(made.outcome.method)}"
        settings = Settings(batch_size=prepared.settings.batch_size)
        try:
            with told(made.say):
                found = audit(
                    prepared.model,
                    made.outcome.model,
                    prepared.forget,
                    prepared.remain,
                    task.test,
                    retrained,
                    objective=task.objective,
                    settings=settings,
                    done=done,
                    keep=computed if made.work is None else Folder(made.work / AUDIT),
                    progress=progress,
                )
        except ExpungeError as error:
            made.say(f"no audit was made: {error}")
            return {"audit": {"verdict": None, "why": str(error)}}
        # Weights as in the receipt. A plain digest of the forget set, or of the rest, would let whoever has the data confirm a guess.
        weights = {**found.weights, "before": made.weights_before, "after": made.weights_after}
        found = replace(found, weights=weights, data={"test": found.data["test"]})
        write_json(folder / NUMBERS, encode(found))
        write_bytes(folder / PAGE, audit_page(found).encode(errors="replace"))
        write_bytes(folder / CARD, found.markdown().encode())
        for line in str(found).splitlines():
            made.say(line)
        return {"audit": {"verdict": encode(found.verdict), "retrained": found.retrained}}

    return examine
