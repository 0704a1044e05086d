"""Merge of partial attention states over disjoint keys."""
