"""What each command is for, in a line; apart from the commands, so that help imports none."""

from __future__ import annotations

SUMMARIES = {
    "serve": "serve a model over HTTP, as OpenAI's API",
    "generate": "complete a prompt and print the text",
    "chat": "talk with a model, here or on a server",
    "run-batch": "answer a file of requests (OpenAI's batch format)",
    "show": "print who computes which row, stores which token and sends what; starts nothing",
    "plan": "print which layouts fit a model and devices, how fast they would be, and why",
    "simulate": "serve a trace with the real scheduler on a modelled clock: times, hits, limits",
    "view": "write one self-contained HTML page: mesh, ownership, a step, plans side by side",
    "verify": "compare layouts with one rank: same tokens, same logits",
    "doctor": "print machine, versions and measured costs; or what a MODEL would need here",
    "bench": "time a model on a layout (latency, throughput, ...), or a server (serve)",
    "bench serve": "time the answers of a server to a load of random prompts",
    "warmup": "compile the kernels that a MODEL will use here",
}
"""In the order of the help; names of two words are commands inside commands."""
