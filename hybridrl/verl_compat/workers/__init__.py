"""`verl.workers`."""
