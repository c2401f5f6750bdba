"""The training server: clients of Tinker's API train adapters of one base model, which this package runs.

The client is the public package `tinker`. `hybridrl serve --tinker` starts the server.
"""
