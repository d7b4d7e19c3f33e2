"""Compute the exact diagonal of the Fisher information of any module, and add up its sums."""

from expunge.fisher.absolute_values import absolute
from expunge.fisher.chunks import by_chunks, by_group
from expunge.fisher.engine import KINDS, diagonal
from expunge.fisher.planning.description import FisherPlan, ParameterPlan
from expunge.fisher.plans import plan
from expunge.fisher.sharded import load_sums, save_sums, sharded_diagonal
from expunge.fisher.sums import FisherSums

__all__ = [
    "KINDS",
    "FisherPlan",
    "FisherSums",
    "ParameterPlan",
    "absolute",
    "by_chunks",
    "by_group",
    "diagonal",
    "load_sums",
    "plan",
    "save_sums",
    "sharded_diagonal",
]
