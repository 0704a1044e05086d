"""Certification: a layout against one rank, step by step, by declared oracles."""
