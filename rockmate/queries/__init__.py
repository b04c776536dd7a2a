"""Questions about a model and a budget, beside training under it."""
