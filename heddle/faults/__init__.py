"""Where each rank stands, what it last said to the others, and faults on purpose."""
