"""A second memory beside the one that computes: tensors leave for it and come back while computation goes on."""
