"""The exact diagonal of the Fisher information of any module, and sums of it."""

from expunge.fisher.engine import KINDS, diagonal
from expunge.fisher.sums import FisherSums

__all__ = ["KINDS", "FisherSums", "diagonal"]
