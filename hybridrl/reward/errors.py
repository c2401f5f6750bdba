"""The error of this room."""

from hybridrl.utils.errors import UserError


class RewardError(UserError):
    """A reward function, manager or score cannot be used; the message names the sample or file and what to change."""
