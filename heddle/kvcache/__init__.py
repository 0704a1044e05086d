"""KV accounting: blocks, reference counts and the prefix cache. No tensors."""
