"""The HTTP server: OpenAI's shapes outside, the engine's words inside."""
