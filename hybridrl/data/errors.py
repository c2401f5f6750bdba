"""The error of this room."""

from hybridrl.utils.errors import UserError


class DataError(UserError):
    """A data file, row, dataset class or sampler cannot be used; the message names it and says what to change."""
