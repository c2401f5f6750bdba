"""Checks of a run before it is started: `hybridrl check` (docs/check.md).

What a run refuses at its start is refused by the same functions here. `findings` collects what they say, `row_lengths`
and `answer_scores` try data and reward functions, and `expectation` predicts memory and seconds.
"""
