"""The one error of this room."""


class AlgorithmError(ValueError):
    """An algorithm was given a setting or data it cannot work with.

    The message names the setting or the tensor at fault, the value found, what is allowed and what to change. It is a
    ``ValueError`` because this room imports nothing else of the package, and because that is what code written for
    verl expects.
    """
