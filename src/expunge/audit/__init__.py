"""Say whether a network still knows what it was to forget: evidence with intervals, and a verdict by stated rules.

The room itself can be called: `expunge.audit(before, after, forget, remain, test)` is `expunge.audit.auditing.audit`.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

from expunge.audit.auditing import audit
from expunge.audit.findings import Judgement, Measure, Reason, Test
from expunge.audit.intervals import Interval
from expunge.audit.policy import Policy, load_policy
from expunge.audit.report import Audit, load_audit
from expunge.audit.settings import Settings

__all__ = ["Audit", "Interval", "Judgement", "Measure", "Policy", "Reason", "Settings", "Test", "audit", "load_audit", "load_policy"]


class _Room(ModuleType):
    """The import of any module in here puts the room, not the function, under the name `expunge.audit`."""

    def __call__(self, *arguments: Any, **options: Any) -> Audit:
        return audit(*arguments, **options)


_Room.__call__.__doc__, _Room.__call__.__wrapped__ = audit.__doc__, audit  # type: ignore[attr-defined]
sys.modules[__name__].__class__ = _Room
