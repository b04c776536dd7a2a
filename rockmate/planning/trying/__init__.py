"""Plans on real steps: what one takes, and which of two is the quicker."""
