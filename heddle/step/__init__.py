"""Global batch -> plan -> one rank's step; pure, and the same on every rank."""
