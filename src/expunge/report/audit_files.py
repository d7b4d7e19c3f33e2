"""Write the files of an audit into a folder that keeps its finished parts too."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from expunge.audit.report import CARD, COMMAND, Audit
from expunge.report.audit_page import audit_page
from expunge.storage.codec import encode
from expunge.storage.files import write_bytes, write_json
from expunge.storage.folders import RESULT, check_owned, signature

PAGE = "audit.html"


def check_owner(folder: str | os.PathLike[str]) -> None:
    """Raise rather than replace files that no audit has written."""
    check_owned("out", folder, COMMAND, [PAGE, CARD])


def write_audit(folder: str | os.PathLike[str], audit: Audit, options: Mapping[str, Any]) -> None:
    """Each file whole or not at all, result.json last. An earlier audit's result goes first: no page stands beside another's numbers."""
    out = Path(folder)
    page = audit_page(audit).encode(errors="replace")
    result = signature(COMMAND, [PAGE, CARD])
    write_json(out / RESULT, result)  # these files are ours, also where the next lines are cut short
    write_bytes(out / PAGE, page)
    write_bytes(out / CARD, audit.markdown().encode())
    write_json(out / RESULT, result | {"audit": encode(audit), "options": dict(options)})
