"""Attention: states and their merge, storage, local backends, exchanges, kinds."""
