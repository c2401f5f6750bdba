"""One file per family of models: its dimensions and the table of its weights."""
