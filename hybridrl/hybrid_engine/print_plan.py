"""`python -m hybridrl.hybrid_engine.print_plan`: the bytes and memory of a transition, computed and not measured."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import numpy as np

from hybridrl.errors import ConfigError, UserError
from hybridrl.hybrid_engine.plan import Plan, compared, plan
from hybridrl.layouts.model_tensors import model_tensors
from hybridrl.layouts.topology import GenerationLayout, Layout, parse_layout
from hybridrl.models.model_config import load_model_config
from hybridrl.registry import TRAIN_ENGINES
from hybridrl.utils.user_code import load_object


def parse_training(text: str) -> Layout:
    """Make a training layout of `STRATEGY:name=size,...`.

    Raises:
        ConfigError: another strategy, or a size that the strategy's layout does not have.
    """
    strategy, _, sizes = text.partition(":")
    layouts = {
        name: declared
        for name in TRAIN_ENGINES.names()
        if (declared := TRAIN_ENGINES.metadata(name).layout) is not None
    }
    if strategy not in layouts:
        raise ConfigError(f"{text!r} does not begin with one of {', '.join(layouts)}, then a colon")
    declared = layouts[strategy]
    layout = load_object(declared, None, "layout", "layout") if isinstance(declared, str) else declared
    return parse_layout(sizes, layout)


def _gigabytes(elements: float, width: int) -> str:
    return f"{elements * width / 1e9:.2f}"


def _span(values: np.ndarray, width: int) -> str:
    low, high = _gigabytes(values.min(), width), _gigabytes(values.max(), width)
    return low if low == high else f"{low} to {high}"


def format_plan(transition: Plan, width: int, per_device: bool = False) -> str:
    """Return the text that the command prints.

    Args:
        transition: the plan.
        width: bytes per element.
        per_device: one line per device as well.
    """
    routes = sum(len(tensor.routes) for _, tensor in transition.tensors)
    rows = [
        ("model", _gigabytes(transition.elements, width)),
        ("training shard per device", _span(transition.resident, width)),
        ("generation shard per device", _span(transition.needed, width)),
        ("of it already there", _span(transition.reused, width)),
        ("received per device", _span(transition.received, width)),
        ("sent per device", _span(transition.sent, width)),
    ]
    layouts = [
        f"{name} {layout.describe()}"
        for name, layout in (("training", transition.training), ("generation", transition.generation))
        if layout is not None
    ]
    lines = [
        ", ".join([f"{len(transition.slots)} devices", *layouts]),
        f"computed from the shapes of {len(transition.tensors)} tensors, at {width} bytes per element; GB = 1e9 bytes; "
        f"{routes} routes",
        "",
        *(f"{name:<30} {value:>20} GB" for name, value in rows),
        "",
        f"{'largest over devices, in GB':<30} {'received':>12} {'peak':>12} {'redundant':>12}",
    ]
    for name, volume in compared(transition).items():
        values = (volume.received, volume.peak, volume.redundant)
        lines.append(f"{name:<30} " + " ".join(f"{_gigabytes(value, width):>12}" for value in values))
    if per_device:
        lines += ["", f"{'device':>6} {'place':>6} {'training':>10} {'generation':>10} {'received':>10} {'sent':>10}"]
        for device, slot in enumerate(transition.slots):
            columns = (transition.resident, transition.needed, transition.received, transition.sent)
            cells = " ".join(f"{_gigabytes(column[device], width):>10}" for column in columns)
            lines.append(f"{device:>6} {slot:>6} {cells}")
    return "\n".join(lines)


def _as_json(transition: Plan, width: int) -> str:
    elements = {
        "held": transition.resident,
        "needed": transition.needed,
        "kept": transition.reused,
        "received": transition.received,
        "sent": transition.sent,
    }
    per_device = {name: (column * width).tolist() for name, column in elements.items()}
    return json.dumps({"slots": transition.slots, "bytes": per_device, "model_bytes": transition.elements * width})


def main(arguments: list[str] | None = None) -> int:
    """Print a plan. Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m hybridrl.hybrid_engine.print_plan", description=__doc__)
    parser.add_argument("model", type=Path, help="a model's folder, or its config.json; no weights are read")
    parser.add_argument("--training", required=True, help="fsdp2:shard=8 or megatron:tp=4,pp=2,dp=2")
    parser.add_argument("--generation", required=True, help="tp=2,replicas=4")
    parser.add_argument("--bytes", type=int, default=2, help="per element (default: 2, bfloat16)")
    parser.add_argument("--per-node", type=int, default=8, help="devices per node (default: 8)")
    parser.add_argument("--per-device", action="store_true", help="one line per device")
    parser.add_argument("--json", action="store_true", help="print the bytes of each device as JSON")
    options = parser.parse_args(arguments)
    folder = options.model.parent if options.model.name == "config.json" else options.model
    try:
        training = parse_training(options.training)
        generation = parse_layout(options.generation, GenerationLayout)
        specs, layers = model_tensors(load_model_config(folder))
        transition = plan(specs, training, generation, layers, per_node=options.per_node)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(
        _as_json(transition, options.bytes)
        if options.json
        else format_plan(transition, options.bytes, options.per_device)
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
