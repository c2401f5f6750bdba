"""Parquet to prompts: datasets, samplers, loaders; one preprocessing script a data set."""
