"""Decoder models on one rank: configuration files, weights, layers, families.

Importing this package loads no torch; `heddle.models.registry` and everything below it does.
"""
