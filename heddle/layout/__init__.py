"""Pure ownership: who stores a token, who computes a row, and which layouts are legal."""
