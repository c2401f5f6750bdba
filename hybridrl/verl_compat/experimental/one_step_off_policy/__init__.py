"""`verl.experimental.one_step_off_policy`."""
