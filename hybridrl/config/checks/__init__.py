"""Checks of settings against each other, the files they name and this machine."""
