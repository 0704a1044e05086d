"""Products of rows with weights that are packed for the processor's registers."""
