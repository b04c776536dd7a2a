"""Calls that become one operation of the graph, whatever is inside them."""
