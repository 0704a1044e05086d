"""New rows into the slots of the cache that this rank owns."""
