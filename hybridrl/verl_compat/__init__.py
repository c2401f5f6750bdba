"""What verl offers and no program here calls; each name is also importable at the path that it has in verl."""
