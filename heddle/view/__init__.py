"""One page that shows a layout: who is with whom, who stores and computes what, one step."""
