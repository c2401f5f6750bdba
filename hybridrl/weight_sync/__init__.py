"""Training weights into generation engines."""
