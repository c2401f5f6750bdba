"""The processes that run reward functions."""
