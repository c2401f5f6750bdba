"""Runs a small model in many arrangements, and compares the weights that they end with (`hybridrl certify`)."""
