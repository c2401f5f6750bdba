"""`main_generation`: generates responses to the prompts in a file, in parts, so that a killed run can resume."""
