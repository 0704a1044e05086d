"""One rank at work: executes a step and answers."""
