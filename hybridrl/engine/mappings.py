"""Readers of the mappings that optimizers and Megatron-core take."""

import importlib.util
import re
from collections.abc import Iterator

from hybridrl.config.entry_settings import group_type
from hybridrl.config.mappings import Entries, reads_mapping
from hybridrl.config.schema.megatron import MegatronConfig
from hybridrl.errors import UserError
from hybridrl.registry import TRAIN_ENGINES
from hybridrl.utils.user_code import names_file

#: names of settings in errors of optimizers, not those of torch.optim
_OPTIM = r"(?<![\w.])optim\."
_STRATEGY = "..strategy|..engine.strategy"


@reads_mapping("optimizer-arguments")
def check_optimizer_arguments(entries: Entries) -> Iterator[str]:
    """Check `optim.override_optimizer_config` against the class of the optimizer."""
    group = entries.key.rpartition(".")[0]
    optim, strategy = entries.lookup(group), entries.near(_STRATEGY)
    module = optim.optimizer_impl.removeprefix("pkg://")
    if not names_file(module) and importlib.util.find_spec(module.split(".")[0]) is None:
        return  # another check reports it
    yield from entries.contradictions({name: f".{name}" for name in ("lr", "betas", "weight_decay")})
    if not TRAIN_ENGINES.is_builtin(strategy):
        return  # a user's own engine may have optimizers of its own
    try:
        TRAIN_ENGINES.get(strategy).check_optimizer(optim)
    except UserError as error:
        yield f"{entries.key}: {re.sub(_OPTIM, f'{group}.', str(error))}"


@reads_mapping("ddp-fields")
def check_ddp_fields(entries: Entries) -> Iterator[str]:
    """Check `megatron.override_ddp_config` against what the engine takes of Megatron-core's settings."""
    from hybridrl.engine.megatron.build import check_ddp_overrides

    if _reads_megatron(entries):
        try:
            check_ddp_overrides(entries.values)
        except UserError as error:
            yield str(error).replace("megatron.override_ddp_config", entries.key)


@reads_mapping("transformer-fields")
def check_transformer_fields(entries: Entries) -> Iterator[str]:
    """Check the names of `megatron.override_transformer_config`; values are checked with the model's own."""
    if _reads_megatron(entries) and importlib.util.find_spec("megatron") is not None:
        from hybridrl.engine.megatron.build import transformer_fields

        yield from entries.unknown(transformer_fields(), "Megatron-core's TransformerConfig")


def _reads_megatron(entries: Entries) -> bool:
    """Whether the chosen engine reads the settings of Megatron-core that hold a mapping."""
    strategy = entries.near(".strategy")
    return TRAIN_ENGINES.knows(strategy) and issubclass(group_type(TRAIN_ENGINES.settings(strategy)), MegatronConfig)
