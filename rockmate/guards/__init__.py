"""What a plan takes for granted of a call, and how each call is checked against it."""
