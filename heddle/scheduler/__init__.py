"""Requests, queues and the choice of each step. No tensors."""
