"""Serve deletion requests on one's own model: a task file, a forget set, new weights, a ledger, a receipt, an undo."""
