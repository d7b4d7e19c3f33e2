"""Which weights to reset, how to distil, for how long: trials on seeds 1 to 3 and a validation part, never the test set."""
