"""Commands that look at training without a plan."""
