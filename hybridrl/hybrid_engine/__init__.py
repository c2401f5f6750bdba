"""Brings the weights from their training layout to their generation layout (HybridFlow, section 5)."""
