"""`hybridrl certify`: which arrangements of a run end with the same weights, bit for bit."""

import argparse
import importlib.util
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hybridrl.registry import INFERENCE_ENGINES
from hybridrl.trainer.certify.certified_runs import ENGINES, CertifiedRun, certified_runs, with_references

_HEADERS = ("run", "compared with", "weights", "result")
BROKEN = 1


def main(argv: Sequence[str] | None = None, command: str = "python -m hybridrl.trainer.certify.certify_command") -> int:
    """Run the command line.

    Returns:
        0; 1 where weights that have to be equal are not, or a run failed; 2 with a message where arguments are wrong.
    """
    args = _arguments(argv, command)
    try:
        runs = _runs(args)
    except KeyError as error:
        print(f"error: --only {error.args[0]!r}: no such row; see {command} --list", file=sys.stderr)
        return 2
    if args.list:
        print("\n".join(run.name for run in runs))
        return 0
    if args.folder is not None and args.folder.exists() and any(args.folder.iterdir()):
        print(f"error: --folder {args.folder}: it has to be empty or absent", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory(prefix="hybridrl-certify-") as temporary:
        rows = _certified(runs, args, args.folder or Path(temporary))
    print(json.dumps([_data(row) for row in rows], indent=2) if args.json else "\n".join(as_table(rows)))
    return 0 if all(row.holds for row in rows) else BROKEN


def _certified(runs: Sequence[CertifiedRun], args: argparse.Namespace, folder: Path) -> list[Any]:
    from hybridrl.trainer.certify.certificate import CertificateRow, certify  # takes seconds (torch, Ray)

    def show(row: CertificateRow) -> None:
        print(f"{row.run.name}: {row.result} ({row.seconds:.0f} s)", file=sys.stderr, flush=True)

    return certify(runs, folder.absolute(), args.model, args.python, show)


def as_table(rows: Sequence[Any]) -> list[str]:
    """Return the lines of the table, as Markdown."""
    cells = [(row.run.name, row.run.reference or "", row.weights, row.result) for row in rows]
    lines = [_HEADERS, ("---",) * len(_HEADERS), *cells]
    return [f"| {' | '.join(line)} |" for line in lines]


def _data(row: Any) -> dict[str, Any]:
    return {
        "run": row.run.name,
        "settings": list(row.run.words),
        "reference": row.run.reference,
        "must_equal": row.run.must_equal,
        "weights": row.weights,
        "largest_difference": row.largest_difference,
        "holds": row.holds,
        "result": row.result,
        "seconds": round(row.seconds, 1),
    }


def _runs(args: argparse.Namespace) -> list[CertifiedRun]:
    if args.only:
        return with_references(args.only)
    return certified_runs(args.engine or [name for name in ENGINES if _installed(name)])


def _installed(engine: str) -> bool:
    packages = INFERENCE_ENGINES.metadata(engine).packages
    return all(importlib.util.find_spec(package) is not None for package in packages)


def _arguments(argv: Sequence[str] | None, command: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog=command,
        description="Train a small model for a few steps in many arrangements, and compare the weights bit for bit.",
        epilog="The exit status is 1 if weights that have to be equal are not. docs/certify.md explains the rows.",
    )
    parser.add_argument("--engine", action="append", choices=ENGINES, help="by default all that are installed")
    parser.add_argument("--only", action="append", metavar="ROW", help="a row, with those that it is compared with")
    parser.add_argument("--list", action="store_true", help="print the names of the rows, and run nothing")
    parser.add_argument("--model", type=Path, help="folder of a model; by default a random one of 0.36 M parameters")
    parser.add_argument("--folder", type=Path, help="keep runs and their output here; by default they are deleted")
    parser.add_argument("--json", action="store_true", help="print JSON in place of a table")
    parser.add_argument("--python", default=sys.executable, help="the Python of the program that is killed")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
