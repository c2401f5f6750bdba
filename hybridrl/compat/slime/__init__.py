"""Settings of slime's scripts, for `hybridrl import slime` (docs/coming_from.md)."""
