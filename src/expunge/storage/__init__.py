"""Tensors and files on disk: safetensors and JSON, written whole or not at all, read within limits, locked while in use."""
