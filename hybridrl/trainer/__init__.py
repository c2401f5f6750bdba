"""The controller programs. Each is plain Python that calls worker groups."""
