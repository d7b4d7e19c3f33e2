"""Write JSON in one form, so that equal content has equal bytes and one digest."""

from __future__ import annotations

import hashlib
import json
from typing import Any


def canonical(content: Any) -> bytes:
    """UTF-8, names sorted, no blanks, a line break at the end; NaN and infinities raise."""
    return (json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False) + "\n").encode()


def digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
