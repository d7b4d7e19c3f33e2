"""Choose a method by what there is to unlearn: the one call without settings."""
