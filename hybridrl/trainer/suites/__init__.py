"""`hybridrl eval --suite`: responses to benchmark suites, their scores, and a table."""
