"""The gate of a feed-forward block."""
