"""What is chosen of a module before it is planned, by measuring: in which layout its convolutions are."""
