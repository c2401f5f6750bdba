"""What each group of settings holds: dataclasses with types, limits and meanings."""
