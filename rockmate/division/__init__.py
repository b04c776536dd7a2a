"""Dividing the joint graph of a forward and its backward: what is saved between them, and what that takes."""
