"""How a forgotten tensor comes back."""
