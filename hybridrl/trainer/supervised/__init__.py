"""The controller program of supervised training."""
