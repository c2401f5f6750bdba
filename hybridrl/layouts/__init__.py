"""Layouts: how a model's tensors are divided over devices, and the slices of each tensor that a device holds."""
