"""One file per attention kind: how a stored row is read, and in which form queries meet it."""
