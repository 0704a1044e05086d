"""What this machine does and what Heddle makes of it, timed side by side in one run."""
