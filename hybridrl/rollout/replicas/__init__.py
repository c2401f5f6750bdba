"""Replicas of an inference engine: the Ray actors, their handles, and the pool that feeds them."""
