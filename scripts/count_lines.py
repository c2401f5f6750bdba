"""Counts lines of code proper per package: no blank lines, no comments, no docstrings.

    python scripts/count_lines.py [COMMIT ...]

Without a commit the working tree is counted; with several, they are columns of one table. A line that holds several
statements counts once, and a statement over several lines counts with all of them.
"""

from __future__ import annotations

import argparse
import ast
import io
import subprocess
import sys
import tarfile
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
_NO_CODE = {
    *(tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT),
    *(tokenize.ENCODING, tokenize.ENDMARKER),
}


def code_lines(source: str) -> int:
    """Return the number of lines of a module with code on them."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in _NO_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and node.body:
            first = node.body[0]
            if (
                isinstance(first, ast.Expr)
                and isinstance(first.value, ast.Constant)
                and isinstance(first.value.value, str)
            ):
                lines.difference_update(range(first.lineno, (first.end_lineno or first.lineno) + 1))
    return len(lines)


def sources(commit: str | None) -> Iterator[tuple[str, str]]:
    """Yield path and text of each module of the library and of its other distributions."""
    folders = ["hybridrl", "packages"]
    if commit is None:
        for path in sorted(file for folder in folders for file in (ROOT / folder).rglob("*.py")):
            yield path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8")
        return
    listed = subprocess.run(
        ["git", "ls-tree", "--name-only", commit], cwd=ROOT, capture_output=True, text=True, check=True
    )
    present = [folder for folder in folders if folder in listed.stdout.split()]
    archive = subprocess.run(["git", "archive", commit, *present], cwd=ROOT, capture_output=True, check=True).stdout
    with tarfile.open(fileobj=io.BytesIO(archive)) as files:
        for member in files:
            if member.name.endswith(".py") and (file := files.extractfile(member)) is not None:
                yield member.name, file.read().decode()


def packages(commit: str | None) -> Counter[str]:
    """Return the lines of code of each package."""
    counts: Counter[str] = Counter()
    for path, text in sources(commit):
        parts = path.split("/")
        name = parts[1] if len(parts) > 2 else "top level"
        counts[name] += code_lines(text)
    return counts


def main(argv: list[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="python scripts/count_lines.py", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("commits", nargs="*", help="what to count; the working tree if none is named")
    commits = parser.parse_args(argv).commits
    columns = [packages(commit) for commit in commits or [None]]
    print("| package |", " | ".join(commits or ["lines"]), "|")
    print("|---|" + "---|" * len(columns))
    for name in sorted(set().union(*columns)):
        print(f"| {name} |", " | ".join(f"{column[name]:,}" for column in columns), "|")
    print("| sum |", " | ".join(f"{column.total():,}" for column in columns), "|")


if __name__ == "__main__":
    sys.exit(main())
