"""Plans improved step by step: greedy eviction, repair, local search."""
