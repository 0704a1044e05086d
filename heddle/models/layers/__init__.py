"""Parts that decoder families share; each works on one rank's slice."""
