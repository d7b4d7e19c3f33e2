"""Hold what shadows say of the candidates of one audit, and raise where they are shadows of another."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy
import torch
from torch import Tensor, nn

from expunge.audit.checks import TWINS
from expunge.audit.policy import Policy
from expunge.audit.reading import Reading
from expunge.audit.shadow_attacks import ShadowSignals
from expunge.data.batches import as_batches
from expunge.data.fingerprints import Unreadable, fingerprints
from expunge.errors import InputError, MismatchError
from expunge.validate import shown

ARGUMENT = "shadows"


@dataclass(frozen=True, eq=False)
class ShadowEvidence:
    """The φ of every candidate by every shadow, and the candidates themselves, to ask other networks about; `Shadows.evidence` makes it.

    `forgotten` marks the candidates that the audited network was to forget; it never saw the others. `bounded` are `signals` with RULI's
    floor of 1e-6. `samples` are the candidates as they were trained on, `asked` as networks are asked about them. `forms` are the names and
    shapes of a shadow's weights, `method` is how each of them forgot.
    """

    signals: ShadowSignals
    bounded: ShadowSignals
    forgotten: Tensor
    samples: Any
    asked: Any
    labels: Tensor
    forms: Mapping[str, tuple[int, ...]]
    method: str

    @property
    def number(self) -> int:
        return len(self.signals.members)


def forms_of(network: nn.Module) -> dict[str, tuple[int, ...]]:
    """Names and shapes of its weights."""
    return {name: tuple(value.shape) for name, value in network.state_dict().items() if isinstance(value, Tensor)}


def check_evidence(evidence: Any, before: nn.Module, policy: Policy) -> None:
    """As much as can be said before any network is asked."""
    if not isinstance(evidence, ShadowEvidence):
        raise InputError(ARGUMENT, "must be what Shadows.evidence(method, forgotten) returns", shown(evidence))
    if evidence.number < policy.shadows:
        raise InputError(ARGUMENT, f"must be {policy.shadows} or more (policy.shadows), fewer have no interval", evidence.number)
    for what, mask in (("forgotten", evidence.forgotten), ("never seen", ~evidence.forgotten)):
        if int(mask.sum()) < policy.samples:
            rule = f"must have {policy.samples} candidates or more (policy.samples) that were {what}"
            raise InputError(ARGUMENT, rule, int(mask.sum()))
    if (own := forms_of(before)) != dict(evidence.forms):
        odd = next(name for name in (*own, *evidence.forms) if own.get(name) != evidence.forms.get(name))
        raise MismatchError(
            f"{ARGUMENT}: must be of networks like `before`; {odd} is {evidence.forms.get(odd, 'missing')} in a shadow, "
            f"{own.get(odd, 'missing')} in the original"
        )


def check_candidates(evidence: ShadowEvidence, original: Reading) -> None:
    """The forgotten candidates must be forget samples; the others must be in neither of the sets that the original was trained on."""
    known = {name: original[name].marks for name in ("forget", "remain")}
    candidates = [marks for data in (evidence.samples, evidence.asked) if (marks := _marks(data)) is not None]
    if known["forget"] is None or not candidates:
        return  # samples that are no tensors cannot be compared
    forgotten = evidence.forgotten.numpy()
    wrong = min(int((~numpy.isin(marks[forgotten], known["forget"])).sum()) for marks in candidates)
    if wrong:
        raise MismatchError(f"{ARGUMENT}: {wrong} of {int(forgotten.sum())} forgotten candidates are no forget samples: of other data")
    trained = [marks for marks in known.values() if marks is not None]
    seen = max(int(numpy.isin(marks[~forgotten], numpy.concatenate(trained)).sum()) for marks in candidates)
    if seen > TWINS * len(forgotten):
        rule = "candidates that are not forgotten must be samples that the audited network never saw, such as test samples"
        raise InputError(ARGUMENT, rule, f"{seen} of the forget or remain set")


def _marks(data: Any) -> numpy.ndarray[Any, Any] | None:
    def parts() -> Iterator[Any]:
        for batch in as_batches(data, ARGUMENT, 128):
            yield fingerprints(batch)

    try:
        return numpy.concatenate([*parts()])
    except Unreadable:
        return None


def of_labels(labels: Tensor, given: Tensor) -> None:
    """The labels that the shadows were asked with must be those of the candidates now."""
    if not torch.equal(labels.cpu(), given.cpu()):
        raise MismatchError(f"{ARGUMENT}: the candidates have other labels than the shadows were asked with: of other data")
