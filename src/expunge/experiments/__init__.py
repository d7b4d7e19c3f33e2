"""Run the cells of experiments and the networks they need, continue where a run stopped, and keep the results."""
