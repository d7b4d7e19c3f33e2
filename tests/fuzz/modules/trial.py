"""Run one random model: the engine against the definition; and make a failing one smaller."""

from __future__ import annotations

import inspect
import re
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

import expunge.errors
from expunge import fisher
from expunge.errors import ExpungeError
from tests.fuzz.modules import definition, queued
from tests.fuzz.modules.grammar import Program

EQUAL, REFUSED, INVALID, WRONG = "equal", "refused", "invalid", "wrong"
FAINT = "a coupling below what counts as rounding"  # docs/fisher.md, Exactness; gradients may be off by more than outputs
ROUNDED = "rounding decides"  # the loop itself is another one where weights change by parts of a million, as float32 may change them
TORCH = "torch alone: its gradients are not those of its own outputs"
OWN_WARNINGS = [kind for kind in vars(expunge.errors).values() if isinstance(kind, type) and issubclass(kind, Warning)]


@dataclass(frozen=True)
class Outcome:
    """How a model ended: equal, refused, or as none should."""

    word: str  # EQUAL, REFUSED, INVALID (the plain model fails on one sample), WRONG, or an exception's name
    text: str = ""

    @property
    def failed(self) -> bool:
        return self.word not in (EQUAL, REFUSED, INVALID, FAINT, ROUNDED, TORCH)


def run(source: str, on_engine: Callable[[], None] = lambda: None) -> Outcome:
    """The outcome of a program's text; `on_engine` is called when torch alone is done and the engine begins."""
    try:
        space: dict[str, Any] = {"__name__": "program"}
        exec(compile(source, "program", "exec"), space)
        with warnings.catch_warnings(record=True) as usual:
            warnings.simplefilter("always")
            torch.manual_seed(1)
            reference = _loops(space, torch.float64)
            plain = None if space["REAL"] == torch.float64 else _loops(space, space["REAL"])
    except Exception:
        return Outcome(INVALID, traceback.format_exc(limit=-6))
    finite = _finite(reference)
    if finite and plain is not None and not _finite(plain):
        return Outcome(INVALID, "numbers that float32 does not hold")
    refusals = []
    on_engine()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for warning in usual:  # the model's own
            warnings.filterwarnings("ignore", message=re.escape(str(warning.message)))
        warnings.filterwarnings("ignore", message="The PyTorch API of nested tensors")  # of encoders without gradients; once in a process
        for kind in OWN_WARNINGS:
            warnings.simplefilter("ignore", kind)
        for kind in space["kinds"]:
            model = space["prepared"]()
            before = _state(model)
            try:
                squares = fisher.diagonal(model, space["batches"](), kind=kind, objective=space["objective"]).sums
            except ExpungeError as error:
                if len(str(error).splitlines()) != 1:
                    return Outcome("an error of several lines", str(error))
                if re.search(r"raised \w+(Error|Exception)", str(error)) and _runs(space):
                    return Outcome("blames what works", str(error))
                refusals.append(str(error))
                continue
            except Exception as error:
                return Outcome(type(error).__name__, f"{kind}\n{traceback.format_exc(limit=-12)}")
            if not finite:
                return Outcome(WRONG, f"{kind}: numbers where the definition has none")
            if _state(model) != before:
                return Outcome("the model was changed", kind)
            if off := definition.differences(squares, reference[kind], plain and plain[kind]):
                if plain is not None and _rounded(space, kind, off, squares, reference[kind]):
                    return Outcome(ROUNDED)
                right = all(_as_measured(space, kind, name, squares[name], reference[kind][name]) for name in off)
                faint = max(off.values()) < 1e-4 and 1e-12 < _coupling(space) < 1e-6
                return Outcome(TORCH if right else FAINT if faint else WRONG, f"{kind}: {off}")
    return Outcome(REFUSED, refusals[0]) if refusals else Outcome(EQUAL)


def _loops(space: dict[str, Any], real: torch.dtype) -> dict[str, dict[str, torch.Tensor]]:
    """The definition of every kind, in this precision."""
    objective = space["objective"]
    return {kind: definition.defined(space["prepared"](real), space["batches"](real), objective, kind) for kind in space["kinds"]}


def _finite(loops: dict[str, dict[str, torch.Tensor]]) -> bool:
    return all(bool(value.isfinite().all()) for totals in loops.values() for value in totals.values())


def _rounded(space: dict[str, Any], kind: str, off: dict[str, float], squares: Any, reference: dict[str, torch.Tensor]) -> bool:
    """Whether rounding may have changed so much: a ReLU or a choice that is nearly another one."""
    others = definition.shaken(space["prepared"], space["batches"], space["objective"], kind)
    for name in off:
        moved = max(float((other[name] - reference[name]).abs().max()) for other in others)
        if not float((squares[name] - reference[name]).abs().max()) <= 10 * moved:
            return False
    return True


def _runs(space: dict[str, Any]) -> bool:
    """Whether the plain model and the loss take whole batches."""
    model, objective = space["prepared"]().eval(), space["objective"]
    try:
        for batch in space["batches"]():
            objective.losses(objective.outputs(model, batch), batch["labels"] if isinstance(batch, dict) else batch[-1]).sum().backward()
    except Exception:
        return False
    return True


def _coupling(space: dict[str, Any]) -> float:
    """By how much the outputs of the plain model change where a sample is alone, as a part of its largest."""
    model, objective, worst = space["prepared"](torch.float64).eval(), space["objective"], 0.0
    for batch in space["batches"](torch.float64):
        together = objective.outputs(model, batch).detach()
        for index, row in enumerate(together):
            alone = objective.outputs(model, definition.alone(batch, index)).detach()[0]
            worst = max(worst, float((row - alone).abs().max() / alone.abs().max()) if alone.shape == row.shape else 1.0)
    return worst


def _as_measured(space: dict[str, Any], kind: str, name: str, squares: torch.Tensor, reference: torch.Tensor) -> bool:
    """Whether differences of outputs say that the squares are right, and the loop's gradients wrong, where these are farthest apart."""
    entry = int((squares - reference).abs().argmax())
    size = definition.measured(space["prepared"](torch.float64), space["batches"](torch.float64), space["objective"], kind, name, entry)
    near, far = (abs(float(value.reshape(-1)[entry]) - size) for value in (squares, reference))
    return near <= max(1e-3 * size, 1e-9 * far) and 1e-3 * size < 0.1 * far  # the size may be zero: of weights that only padding meets


def _state(model: torch.nn.Module) -> Any:
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    flags = {name: (value.requires_grad, value.grad is None, value.detach().numpy().tobytes()) for name, value in tensors.items()}
    return flags, [module.training for module in model.modules()]


def minimised(program: Program, outcome: Outcome, seconds: float = 20.0) -> tuple[Program, Outcome]:
    """A smaller program that ends with the same word."""
    until, shrinking = time.monotonic() + seconds, True
    while shrinking:
        shrinking = False
        for smaller in program.smaller():
            if time.monotonic() > until:
                return program, outcome
            ending = run(smaller.source())
            if ending.word == outcome.word:
                program, outcome, shrinking = smaller, ending, True
                break
    return program, outcome


def kept(program: Program, outcome: Outcome, on_cuda: bool = False) -> str:
    """A Python file of its own that shows the failure; `on_cuda`: where confirmations are those of a GPU."""
    notes = "\n".join(f"# {line}" for line in (f"{outcome.word}: {outcome.text}\nmade of: {', '.join(program.names())}").splitlines())
    loop = inspect.getsource(definition).partition("from __future__ import annotations\n")[2]
    footer = FOOTER
    if on_cuda:
        loop += inspect.getsource(queued).partition("from __future__ import annotations\n")[2]
        footer = footer.replace("    for kind", "    confirm_as_on_cuda()\n    for kind", 1)
    return f"{notes}\n{program.source()}\n{loop}\n{footer}"


FOOTER = """
if __name__ == "__main__":
    from expunge import fisher

    for kind in kinds:
        reference = defined(prepared(torch.float64), batches(torch.float64), objective, kind)
        plain = None if REAL == torch.float64 else defined(prepared(), batches(), objective, kind)
        squares = fisher.diagonal(prepared(), batches(), kind=kind, objective=objective).sums
        print(kind, differences(squares, reference, plain) or "equal")
"""
