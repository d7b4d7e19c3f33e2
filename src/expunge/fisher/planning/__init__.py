"""Decide, on two samples, which closed form fits each use of each parameter."""
