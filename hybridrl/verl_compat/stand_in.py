"""The program that `script` puts in place of Python and its launchers: it runs the command with hybridrl's modules."""

import os
import sys

from hybridrl.verl_compat.shell import USERS_BASH_ENV, real_program, translated


def main() -> None:
    """Replace this process by the command whose words are the arguments, the name of the program first."""
    name, *words = sys.argv[1:]
    program = real_program(name)
    if program is None:
        sys.exit(f"{name}: not found on the PATH, nor next to {sys.executable}")
    # The shells that the program starts get the user's own BASH_ENV.
    users = os.environ.pop(USERS_BASH_ENV, None)
    if users is not None:
        os.environ.pop("BASH_ENV", None)
        if users:
            os.environ["BASH_ENV"] = users
    os.execv(program, [program, *translated(words)])


if __name__ == "__main__":
    main()
