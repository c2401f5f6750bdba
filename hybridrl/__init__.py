"""hybridrl: reinforcement-learning post-training of language models as HybridFlow describes it."""
