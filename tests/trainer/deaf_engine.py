"""An engine that takes new weights and goes on generating with those of the model's folder."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "rollout"))  # it is loaded as a file, in the engine's own process

from plain_engine import PlainEngine

from hybridrl.hybrid_engine.buckets import Bucket


class DeafEngine(PlainEngine):
    """As an engine does that is sent an adapter which no request names."""

    async def load_bucket(self, bucket: Bucket) -> None:
        self.loaded.update(name for name, _ in self.receiver.tensors(bucket))
