"""verl's keys: synonyms, keys of engines not selected, keys refused by name."""
