"""Checks of settings against each other, against the files they name and against this machine."""
