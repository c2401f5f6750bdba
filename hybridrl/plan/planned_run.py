"""Runs with `placement=auto`: the planner's settings are applied once, and recorded for runs that resume."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from hybridrl.config import PPOTrainerConfig
from hybridrl.config.compose import with_settings
from hybridrl.config.repeat import CONFIG
from hybridrl.errors import PlacementError
from hybridrl.notify import notify
from hybridrl.plan.devices import DEVICES, Cluster, devices_here, read_devices
from hybridrl.plan.overrides import overrides
from hybridrl.plan.run_plan import plans, request_for, why_none_fits
from hybridrl.trainer.own_folder import settle_folder
from hybridrl.utils import device

_PLANNED = "placement.planned"
_OF_DEVICES = ("devices", "machine")


def planned(config: PPOTrainerConfig) -> PPOTrainerConfig:
    """Return the settings of a run with those that the planner chose; a run without `placement.auto` has its own.

    Settings that were given are kept. A run that resumes has the plan that its folder records, unless
    `placement.devices` or `placement.machine` changed. On a CPU all roles share the processes that there are.

    Raises:
        PlacementError: the devices are not known to the planner, or nothing fits on them.
        UserError: see `hybridrl.plan.run_plan.request_for`.
    """
    if not config.placement.auto or config.placement.planned:
        return config
    settle_folder(config)
    recorded = _recorded(config)
    plan = _chosen(config) if recorded is None else recorded
    settings = {key: value for key, value in plan.items() if key not in config.set_keys}
    if recorded is not None:
        notify(f"placement=auto: as planned when the run began: {_shown(settings)}")
    changed: PPOTrainerConfig = with_settings(config, {**settings, _PLANNED: settings})
    return changed


def _shown(settings: Mapping[str, Any]) -> str:
    return " ".join(f"{key}={value}" for key, value in settings.items())


def _recorded(config: PPOTrainerConfig) -> dict[str, Any] | None:
    """The plan in the folder of the run that this one resumes; None if there is none for these devices."""
    trainer, placement = config.trainer, config.placement
    if trainer.resume_mode == "disable":
        return None
    folder = Path(trainer.default_local_dir)
    if trainer.resume_mode == "resume_path" and trainer.resume_from_path is not None:
        folder = Path(trainer.resume_from_path).expanduser().parent
    try:
        tree = yaml.safe_load((folder / CONFIG).read_text(encoding="utf-8"))
        earlier = tree["placement"]
        if not earlier["planned"] or any(earlier[name] != placement[name] for name in _OF_DEVICES):
            return None
        return dict(earlier["planned"])
    except (OSError, yaml.YAMLError, KeyError, TypeError, ValueError):  # no run of this version is there
        return None


def _chosen(config: PPOTrainerConfig) -> dict[str, Any]:
    cluster = _cluster(config)
    if cluster is None:
        trainer = config.trainer
        notify(
            f"placement=auto: no GPU, so all roles share {trainer.n_gpus_per_node} processes on this machine "
            "(trainer.n_gpus_per_node)"
        )
        return {"trainer.nnodes": trainer.nnodes, "trainer.n_gpus_per_node": trainer.n_gpus_per_node}
    request = request_for(config, cluster)
    proposals = plans(request)
    if not proposals:
        raise PlacementError(why_none_fits(request))
    words = overrides(request, proposals[0])
    for text in request.assumed:
        notify(f"placement=auto: assumed: {text}")
    notify(
        f"placement=auto: planned for {cluster.count} x {cluster.device.name}, with {proposals[0].step_s:.0f} s per "
        f"step predicted: {_shown(words)}"
    )
    return {key: _value(key, text) for key, text in words.items()}


def _cluster(config: PPOTrainerConfig) -> Cluster | None:
    """The devices; None for a run on a CPU.

    Raises:
        PlacementError: they are not known.
    """
    placement, trainer = config.placement, config.trainer
    if trainer.device == "cpu":
        return None
    if placement.devices is not None:
        return read_devices(placement.devices, placement.machine)
    names = ", ".join(DEVICES)
    if trainer.nnodes > 1:
        raise PlacementError(
            f"placement.auto=True with trainer.nnodes={trainer.nnodes}: only this machine's devices can be seen before "
            f"Ray runs; set placement.devices, such as 16xH100, of {names}"
        )
    if not device.is_gpu():
        return None
    cluster = devices_here()
    if cluster is None:
        raise PlacementError(
            f"placement.auto=True: this machine's {device.current_name()} has no data sheet; set placement.devices to "
            f"what is most like it, of {names}, or leave placement.auto out"
        )
    return cluster


def _value(key: str, text: str) -> Any:
    """The value of a word of the command line."""
    from hydra.core.override_parser.overrides_parser import OverridesParser

    return OverridesParser.create().parse_override(f"{key}={text}").value()
