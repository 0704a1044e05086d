"""Live steps held against one rank: a row is looked at now and then, and computed once more."""
