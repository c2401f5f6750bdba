"""Replicas of an inference engine: Ray actors, their handles, the scheduler of requests, the supervisor."""
