"""`hybridrl check model`: what the library does with a model, tried and compared with transformers."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from hybridrl.config import ModelConfig
from hybridrl.errors import UserError
from hybridrl.registry import INFERENCE_ENGINES, import_external_lib

#: a checkpoint with more bytes is compared by names and shapes, and computed with a small random copy
LARGE_BYTES = 8 << 30
WRONG = 2


def main(argv: Sequence[str] | None = None, command: str = "hybridrl check model") -> int:
    """Run the command line.

    Returns:
        0; 2 where a row failed, or the model cannot be read.
    """
    args = _arguments(argv, command)
    from hybridrl.model_check.check_rows import as_data, as_table  # the checks take seconds to import

    try:
        import_external_lib(args.external_lib)
        rows = []
        for row in _rows(args):
            rows.append(row)
            if not args.json:
                print("\n".join(as_table([row], width=_WIDTH)), flush=True)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return WRONG
    if args.json:
        print(json.dumps(as_data(rows), indent=2))
    failed = [row.topic for row in rows if row.status == "failed"]
    if failed and not args.json:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return WRONG if failed else 0


_WIDTH = 52  # of the longest topic


def _rows(args: argparse.Namespace) -> Iterator[Any]:
    from hybridrl.model_check import generation_checks, stored_checks, training_checks
    from hybridrl.model_check.tiny_copy import write_tiny_copy
    from hybridrl.models.model_config import config_of

    model = ModelConfig(path=args.model, trust_remote_code=args.trust_remote_code)
    config = config_of(model)
    has_weights = any(Path(args.model).expanduser().glob("*.safetensors"))
    size = sum(file.stat().st_size for file in Path(args.model).expanduser().glob("*.safetensors"))
    small = args.tiny or not has_weights or size > LARGE_BYTES
    yield stored_checks.check_configuration(model)
    if has_weights:
        yield from stored_checks.check_stored(model, args.all_weights or size <= LARGE_BYTES)
    if not args.no_text:
        yield from stored_checks.check_text(model)
    with tempfile.TemporaryDirectory(prefix="hybridrl-check-") as folder:
        used = model
        if small:
            write_tiny_copy(config, Path(folder))
            used = ModelConfig(path=folder, trust_remote_code=args.trust_remote_code)
            print("computed with a small random copy of the configuration", file=sys.stderr)
        reference = training_checks.reference_run(used)
        yield from training_checks.check_training(used, reference)
        yield from training_checks.check_megatron(used, reference)
        yield from generation_checks.check_generation(used, _replicated(), args.engine or ())


def _replicated() -> list[str]:
    """The engines with replicas, whose settings can be checked without starting one."""
    return [name for name in INFERENCE_ENGINES.names() if INFERENCE_ENGINES.metadata(name).has_replicas]


def _arguments(argv: Sequence[str] | None, command: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog=command,
        description="Read a model's files, compute with it, and compare with transformers. Nothing is changed.",
        epilog="The exit status is 2 if a row failed: a number differs or something would be lost. docs/models.md "
        "explains the rows.",
    )
    parser.add_argument("model", help="folder of a model, or of a config.json alone")
    parser.add_argument(
        "--engine", action="append", choices=_replicated(), help="start this engine, too, and compare its tokens"
    )
    parser.add_argument("--tiny", action="store_true", help="compute with a small random copy; large models always do")
    parser.add_argument("--all-weights", action="store_true", help="read and compare every weight of a large model")
    parser.add_argument("--no-text", action="store_true", help="leave out tokenizer and chat template")
    parser.add_argument("--trust-remote-code", action="store_true", help="run Python code that comes with the model")
    parser.add_argument("--external-lib", help="module or file that registers classes of the model")
    parser.add_argument("--json", action="store_true", help="print JSON in place of a table")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
