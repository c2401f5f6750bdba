"""Share of the devices' arithmetic that an update uses: model FLOPs per second over the peak (MFU)."""

from collections.abc import Sequence
from typing import Any

from hybridrl.config import ModelConfig
from hybridrl.models.model_config import config_of
from hybridrl.models.work import training_flops
from hybridrl.notify import notify
from hybridrl.single_controller import WorkerGroup
from hybridrl.utils import device

_TERA = 1e12


class Utilization:
    """Measures the updates of one model.

    Args:
        name: of the model, such as `actor`.
        model: its settings.
        group: the ranks that update it.
        method: the method that does.
        value_model: whether its output layer is a value head.
        peak: TFLOPs per second of a device; None: that of the device's name, if it is known.
    """

    def __init__(
        self, name: str, model: ModelConfig, group: WorkerGroup, method: str, value_model: bool, peak: float | None
    ) -> None:
        self._name = name
        self._config = config_of(model)
        self._group: Any = group
        self._method = method
        self._is_value, self._is_frozen = value_model, model.adapted
        self._seconds = self._update_seconds()
        names = sorted(set(group.device_name()))
        of_devices = [device.peak_tflops(name) for name in names]
        self._peak = peak if peak is not None else min(filter(None, of_devices), default=None)
        if None in of_devices and peak is None and any(name != "cpu" for name in names):
            self._peak = None
            notify(
                f"perf/mfu/{name} is not measured, because the peak of {', '.join(names)} is not known here; set "
                "trainer.peak_tflops to it"
            )
        if training_flops(self._config, [1], 1, value_model) is None:
            notify(
                f"perf/tflops/{name} and perf/mfu/{name} are not measured, because the FLOPs of model_type="
                f"{self._config.get_text_config().model_type} are not known here"
            )

    def measure(self, lengths: Sequence[int], predicted: int, passes: int = 1) -> dict[str, float]:
        """Return the metrics of the updates since the previous call.

        Args:
            lengths: tokens of each sequence.
            predicted: tokens with a loss.
            passes: how often each sequence was trained on.

        Returns:
            `perf/tflops/<name>`, per device, and `perf/mfu/<name>`; what cannot be known is left out.
        """
        before, self._seconds = self._seconds, self._update_seconds()
        flops = training_flops(self._config, lengths, predicted, self._is_value, self._is_frozen)
        seconds = (self._seconds - before) * self._group.world_size
        if flops is None or seconds <= 0:
            return {}
        tflops = passes * flops / seconds / _TERA
        metrics = {f"perf/tflops/{self._name}": tflops}
        if self._peak is not None:
            metrics[f"perf/mfu/{self._name}"] = tflops / self._peak
        return metrics

    def _update_seconds(self) -> float:
        return float(self._group.method_seconds.get(self._method, 0.0))
