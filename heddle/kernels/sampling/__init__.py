"""The draw of one token from a row of logits."""
