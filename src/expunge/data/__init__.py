"""Turn any data of a user into batches, logits, targets and one loss per sample."""
