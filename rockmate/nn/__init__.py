"""Modules that people put into their models where these take less memory than PyTorch's, whatever plan there is."""

from rockmate.nn.chunked_cross_entropy import ChunkedCrossEntropy
from rockmate.nn.chunked_logits import chunk_logits

__all__ = ["ChunkedCrossEntropy", "chunk_logits"]
