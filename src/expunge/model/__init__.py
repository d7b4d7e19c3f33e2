"""What is read off a model: its classifier, its channels, their activations; and what must hold of it."""
