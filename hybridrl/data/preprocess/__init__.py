"""One script per dataset. Each turns a source into parquet files in the schema that the trainers read."""
