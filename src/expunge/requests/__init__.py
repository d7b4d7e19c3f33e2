"""Serve deletion requests on one's own model: a task file, a forget set, new weights, a ledger, a receipt, an undo."""

from expunge.requests.estimate import estimate
from expunge.requests.forget_sets import forget_rows
from expunge.requests.prepared import Prepared, Request, prepare
from expunge.requests.receipt import Receipt
from expunge.requests.recipes import recorded_recipe
from expunge.requests.request import Made, fulfil
from expunge.requests.settings import Settings
from expunge.requests.task import Task, load_task
from expunge.requests.undo import undo
from expunge.requests.verifying import Finding, prove, verify

__all__ = [
    "Finding",
    "Made",
    "Prepared",
    "Receipt",
    "Request",
    "Settings",
    "Task",
    "estimate",
    "forget_rows",
    "fulfil",
    "load_task",
    "prepare",
    "prove",
    "recorded_recipe",
    "undo",
    "verify",
]
