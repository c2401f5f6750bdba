"""The plain engine of the tests of replicas, on a GPU: placement, CUDA IPC and memory without vLLM or SGLang."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from plain_engine import PlainEngine

from hybridrl.hybrid_engine.receive import WeightReceiver
from hybridrl.utils import device

CACHE_BYTES = 2 * 2**30


class GpuEngine(PlainEngine):
    """`name` is `gpu_engine:GpuEngine`. Its weights stay when they are released; its cache is memory without use."""

    async def start(self) -> None:
        await super().start()
        assert self.spec.devices, "the replica has no GPU"
        here = device.set_device(0)
        self.model = self.model.to(here, torch.bfloat16)
        self.receiver = WeightReceiver(here, copies=False)
        self.cache: Any = torch.empty(CACHE_BYTES, dtype=torch.uint8, device=here)

    async def release(self, tags: Sequence[str]) -> None:
        await super().release(tags)
        if "kv_cache" in tags:
            self.cache = None
            device.empty_cache()

    async def resume(self, tags: Sequence[str]) -> None:
        await super().resume(tags)
        if "kv_cache" in tags and self.cache is None:
            self.cache = torch.empty(CACHE_BYTES, dtype=torch.uint8, device="cuda")
