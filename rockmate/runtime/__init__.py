"""From a plan to code, and what runs it in the place of a module."""
