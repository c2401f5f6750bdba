"""Models and tokenizers: building and loading."""
