"""The controller programs: each is plain Python over worker groups."""
