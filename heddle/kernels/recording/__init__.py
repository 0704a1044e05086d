"""What a pass over rows launches, kept to be launched again."""
