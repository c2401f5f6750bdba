"""hybridrl: reinforcement-learning post-training of language models as HybridFlow describes it."""

__version__ = "0.1.0"
