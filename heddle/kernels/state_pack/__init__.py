"""Partial states as the blocks that an all-to-all sends, and back."""
