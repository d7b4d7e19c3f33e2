"""Trials for issue 16: which weights to reset, how to distil, for how long. Chosen on seeds 1 to 3 and a validation part, never the test set."""
