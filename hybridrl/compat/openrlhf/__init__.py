"""Settings of OpenRLHF's scripts, for `hybridrl import openrlhf` (docs/coming_from.md)."""
