"""Ranks as processes of one host that share memory: no socket lies on the way of any tensor."""
