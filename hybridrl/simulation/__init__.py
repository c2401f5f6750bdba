"""Runs the schedule of training under a virtual clock, with random latencies and faults."""
