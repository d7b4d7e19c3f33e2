"""Add up a batch in halves where it does not fit into memory."""

from __future__ import annotations

from collections.abc import Callable

import torch

from expunge.data.calling import out_of_memory


class Fitting:
    """Remembers how many samples fit at a time, once more were tried, so that later batches are cut at once."""

    def __init__(self) -> None:
        self.most: int | None = None  # not known yet

    def add(self, rows: slice, add: Callable[[slice], None], free: Callable[[], None]) -> None:
        """Call `add` on these rows of a batch: on all, or on halves, and halves of these. It must add nothing where it fails.

        `free` lets go of the memory that is kept from batch to batch.
        """
        samples = rows.stop - rows.start
        if self.most is None or samples <= self.most:
            try:
                return add(rows)
            except RuntimeError as error:
                if samples == 1 or not out_of_memory(error):
                    raise
            # Outside the except block, which would keep the failed pass's tensors alive.
            free()
            self.most = samples - samples // 2
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
        middle = rows.start + samples // 2
        for half in (slice(rows.start, middle), slice(middle, rows.stop)):
            self.add(half, add, free)
