"""Keep tensors and JSON on disk: written whole or not at all, read within limits, locked while in use."""
