"""The base of every error that the user can mend."""


class UserError(Exception):
    """Something the user set or supplied cannot work; the message says what was found and what to change.

    The command line prints it as one message without a traceback and exits with status 2.
    """
