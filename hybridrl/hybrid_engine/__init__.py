"""Turns the training layout of the weights into the generation layout on the same devices (HybridFlow, section 5)."""
