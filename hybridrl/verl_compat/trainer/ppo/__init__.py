"""`verl.trainer.ppo`."""
