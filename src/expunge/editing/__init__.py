"""Scores, the masks they select, and patches that change weights and can be undone."""
