"""From whatever a user has to batches, logits, targets and one loss per sample."""
