"""`verl.experimental`."""
