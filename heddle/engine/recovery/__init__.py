"""What happens when ranks fail: who is suspected, what is refused, how new ranks take over."""
