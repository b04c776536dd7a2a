"""Plans that recompute some data and move others to a second memory and back, beside the computation."""
