"""Compute squared per-sample gradients by layer type, without a loop over samples."""
