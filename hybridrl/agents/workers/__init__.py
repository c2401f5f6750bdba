"""Processes that run sessions for the controller."""
