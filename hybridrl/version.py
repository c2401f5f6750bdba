"""The version, in a module of its own: every package may import it, and it imports nothing."""

__version__ = "0.1.0"
