"""Settings of prime-rl's TOML files and command lines, for `hybridrl import prime-rl` (docs/coming_from.md)."""
