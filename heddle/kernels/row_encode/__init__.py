"""Rows of the cache as bytes with scales."""
