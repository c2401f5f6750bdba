"""The worker classes: thin, engine-neutral, they connect engine, rollout and algorithms on a device."""
