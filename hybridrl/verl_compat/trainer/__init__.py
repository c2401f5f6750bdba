"""`verl.trainer`."""
