"""Which layout, and why: memory, bytes, calls and seconds foretold from shapes alone."""
