"""The paper's experiments as data: cells, a runner that goes on where it stopped, the printed numbers, tables."""
