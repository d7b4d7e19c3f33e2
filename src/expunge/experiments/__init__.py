"""Cells of experiments as data, the networks they need, a runner that goes on where it stopped, and their results."""
