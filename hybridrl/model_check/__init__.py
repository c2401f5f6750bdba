"""Checks of a model before it is trained (`hybridrl check model`)."""
