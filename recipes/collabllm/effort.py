"""What a conversation costs the user: its length."""

_LONG = 8000  # characters


def compute_score(solution_str: str) -> float:
    """0 for a conversation without a word, down to -1 for one of 8,000 characters or more."""
    return -min(len(solution_str) / _LONG, 1.0)
