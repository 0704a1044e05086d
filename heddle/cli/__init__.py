"""The command line: thin commands over the rooms before it, and the only room that prints."""
