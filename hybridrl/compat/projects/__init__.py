"""`hybridrl import`: projects whose scripts it reads, and the parts that they share."""
