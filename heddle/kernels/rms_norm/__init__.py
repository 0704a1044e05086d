"""Root-mean-square norm, alone or behind a residual sum."""
