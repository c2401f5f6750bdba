"""PPO and its relatives: the trainer, its phases and the roles it places."""
