"""What ranks say to each other: one protocol; alone, between threads, between processes."""
