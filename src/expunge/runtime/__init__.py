"""What a computation borrows and gives back: modes, random numbers, threads, CUDA graphs, progress, what is shown, exit codes."""
