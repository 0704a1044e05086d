"""Low-rank adapters (LoRA) in the format of the PEFT library."""
