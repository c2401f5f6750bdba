"""`main_generation`: responses to the prompts of a file, part by part, so that a killed run goes on where it was."""
