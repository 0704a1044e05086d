"""Decoders of the transformers library whose layers attend through `StepOps`."""
