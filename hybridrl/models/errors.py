"""What can be wrong with a model that a user named."""

from hybridrl.utils.errors import UserError


class ModelError(UserError):
    """A model directory, tokenizer or checkpoint that cannot be used as asked; says which and what to change."""
