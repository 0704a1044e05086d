"""Weights on disk, and how they become a rank's parameters."""
