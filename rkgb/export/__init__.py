"""Graphs for people and other programs: pictures, JSON, networkx."""
