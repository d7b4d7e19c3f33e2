"""Score weights, select masks by the scores, and change weights by patches that can be reverted."""
