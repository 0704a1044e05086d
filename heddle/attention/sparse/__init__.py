"""Sparse top-k attention: an indexer scores every key, each query attends to the best of them."""
