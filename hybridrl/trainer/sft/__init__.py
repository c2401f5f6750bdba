"""The controller program of supervised fine-tuning."""
