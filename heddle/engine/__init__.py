"""The driver and what stands around it: executors, text, outputs, the offline API."""
