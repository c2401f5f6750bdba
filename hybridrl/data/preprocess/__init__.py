"""One file per data set: each turns a source into parquet files in the schema that the trainers read."""
