"""The loss scale of float16 training (Micikevicius et al., Mixed Precision Training, 2018, section 3.2).

Gradients below 6e-8 are zero in float16, and above 65,504 infinite. The loss is multiplied by a power of two before the
backward pass, and the float32 gradients of the master weights are divided by it, which is exact.
"""

from collections.abc import Mapping
from dataclasses import dataclass

_DOUBLED_AFTER = 1000  # steps in a row without an overflow
_LARGEST = 2.0**24


@dataclass
class LossScale:
    """A scale that follows the gradients: halved when they overflow, doubled after many steps in which they do not.

    A step that overflows is computed again with half the scale, so none is lost.

    Attributes:
        value: the scale, a power of two.
        steps: taken with this value.
    """

    value: float = 2.0**16
    steps: int = 0

    def halve(self) -> bool:
        """Halve the scale after an overflow. Return False where it is 1: the gradients themselves are not finite."""
        if self.value <= 1:
            return False
        self.value, self.steps = self.value / 2, 0
        return True

    def count(self) -> None:
        """Count a step that was taken, and double the scale where one is due."""
        self.steps += 1
        if self.steps >= _DOUBLED_AFTER and self.value < _LARGEST:
            self.value, self.steps = self.value * 2, 0

    def state(self) -> dict[str, float]:
        """Return what a checkpoint keeps."""
        return {"value": self.value, "steps": self.steps}

    def load(self, state: Mapping[str, float]) -> None:
        """Continue from a checkpoint."""
        self.value, self.steps = float(state["value"]), int(state["steps"])
