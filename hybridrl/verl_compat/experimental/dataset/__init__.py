"""`verl.experimental.dataset`."""
