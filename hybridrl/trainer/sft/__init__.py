"""Supervised fine-tuning as a controller program."""
