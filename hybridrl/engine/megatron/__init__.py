"""The training engine on megatron-core: tensor, pipeline, context and expert parallelism."""
