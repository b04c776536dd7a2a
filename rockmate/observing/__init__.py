"""Training as it runs, looked at: who holds the memory at the highest moment of a step."""
