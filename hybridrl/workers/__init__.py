"""What a device hosts: thin, engine-neutral workers that join engine, rollout and algorithms."""
