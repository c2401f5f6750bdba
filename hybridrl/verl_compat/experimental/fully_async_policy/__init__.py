"""`verl.experimental.fully_async_policy`."""
