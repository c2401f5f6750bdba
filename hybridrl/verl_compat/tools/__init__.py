"""`verl.tools`."""
