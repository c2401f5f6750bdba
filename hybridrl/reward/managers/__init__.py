"""Reward managers besides `naive`, `batch` and `dapo`; each registers itself."""
