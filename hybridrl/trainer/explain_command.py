"""`hybridrl explain KEY [PROGRAM] [key=value ...]`: the explanation of a setting in such a run."""

import argparse
import sys
from collections.abc import Sequence

from hybridrl.config.command import read_words, user_file
from hybridrl.config.compose import compose_config
from hybridrl.config.explain_setting import explain_setting
from hybridrl.config.short_names import TREES, nearest_names
from hybridrl.config.verl.keys import key_book
from hybridrl.errors import ConfigError
from hybridrl.programs import PROGRAMS
from hybridrl.utils.urls import masked_text


def main(arguments: Sequence[str] | None = None, command: str = "hybridrl explain") -> int:
    """Print the explanation; return 0, or 2 with a message where a name or a setting is wrong."""
    parser = argparse.ArgumentParser(
        prog=command,
        usage="%(prog)s KEY [PROGRAM] [key=value ...]",
        description="Say what a setting means: its default, its value in a run with these settings and where it comes "
        "from, whether it acts, and what follows it. PROGRAM is grpo unless named.",
    )
    parser.add_argument("name", metavar="KEY", help="a key or a short name")
    parser.add_argument("words", nargs=argparse.REMAINDER, metavar="...", help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    words = list(args.words)
    program = words.pop(0) if words and words[0] in PROGRAMS else "grpo"
    tree, defaults = PROGRAMS[program].tree, PROGRAMS[program].defaults
    options = read_words(tree, words, command)
    try:
        composed = compose_config(tree, options.overrides, *user_file(options), defaults=defaults)
    except ConfigError as error:
        print(masked_text(f"error: {error}"), file=sys.stderr)
        return 2
    text = explain_setting(tree, args.name, composed, defaults)
    if text is None:
        short = "." not in args.name and tree in TREES
        hint = nearest_names(tree, args.name) if short else key_book(tree).suggest(args.name)
        print(f"error: {args.name}: {program} has no such setting{hint}", file=sys.stderr)
        return 2
    print(masked_text(text))
    return 0
