"""Parts of a graph compiled to one operation each: which there are, their code, and whether that pays."""
