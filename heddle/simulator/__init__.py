"""A trace of requests, served by the engine's own scheduler on a clock that is a model."""
