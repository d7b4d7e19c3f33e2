"""Check a model, and find its classifier, its channels and their activations."""
