"""`verl.interactions`."""
