"""Pure functions of a model and data."""

from expunge.metrics.accuracy import accuracy, unlearn_score

__all__ = ["accuracy", "unlearn_score"]
