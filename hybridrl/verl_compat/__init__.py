"""The package that answers to the name `verl` for code written for verl.

Its modules have verl's import paths and hold imports of hybridrl's own names. `utils.tensordict_utils` implements what
verl offers and no program here calls. Nothing of hybridrl imports this package: `alias.allow` is its entry point in the
group `hybridrl.import_hooks`, which `hybridrl.utils.user_code` calls.

    python -m hybridrl.verl_compat run PROGRAM ...     run a program that imports verl
    import hybridrl.verl_compat.as_verl                the same from within a program or a notebook

See docs/compat.md for what there is and what is missing.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hybridrl.protocol import DataProto

__all__ = ["DataProto", "__version__"]

#: the version of verl whose names are here
__version__ = "0.9.1"


def __getattr__(name: str) -> Any:
    # Lazy: every process that loads a user's file imports this package, and those of the reward pool have no torch.
    if name == "DataProto":
        from hybridrl.protocol import DataProto

        return DataProto
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
