"""Models that read sequences of tokens."""
