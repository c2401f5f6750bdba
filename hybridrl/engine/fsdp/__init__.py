"""The engine on PyTorch: FSDP2 over several ranks, a plain module on one."""
