"""Attention of few rows over the cache as it lies, block by block, with the log-sum-exp."""
