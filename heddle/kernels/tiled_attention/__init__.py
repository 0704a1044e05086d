"""Attention of many rows at a time, from register tiles, with the log-sum-exp."""
