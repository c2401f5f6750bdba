"""Sends training weights to generation engines."""
