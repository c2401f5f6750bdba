"""The groups of settings: dataclasses with types, limits and meanings."""
