"""The experts of tokens as inference engines return them (`router_replay.mode=R3`).

Shapes: t tokens, D decoder layers, L layers with experts, E experts, K experts per token.
"""

import numpy as np

from hybridrl.config import ModelConfig
from hybridrl.models.model_config import config_of
from hybridrl.models.routers import experts_of, layers_with_routers


class RecordedLayers:
    """Selects the layers with experts from an engine's records, which have a place for every layer.

    Args:
        model: with routers.
    """

    def __init__(self, model: ModelConfig) -> None:
        config = config_of(model)
        experts, self._top_k = experts_of(config)
        self._layers = int(config.get_text_config().num_hidden_layers)
        self._routed = layers_with_routers(config)
        self._dtype = np.uint8 if experts <= 256 else np.int16

    def chosen(self, experts: np.ndarray) -> np.ndarray:
        """The experts `[t, L, K]`, one byte each if they are at most 256.

        Args:
            experts: integers `[t, D, K]`, in this order, of any shape.
        """
        records = experts.reshape(-1, self._layers, self._top_k)
        return np.ascontiguousarray(records[:, self._routed].astype(self._dtype))
