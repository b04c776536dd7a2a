"""Modules that people put into their models where these take less memory than PyTorch's, whatever plan there is."""

from rockmate.nn.chunked_cross_entropy import ChunkedCrossEntropy

__all__ = ["ChunkedCrossEntropy"]
