"""Manage what a computation runs with: modes, random numbers, threads, CUDA graphs, progress, display, exit codes."""
