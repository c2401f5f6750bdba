"""From the configuration to datasets, samplers and loaders."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hybridrl.config.schema.node import default_of
from hybridrl.data.curricula import CurriculumSampler
from hybridrl.data.labelled_dataset import LabelledDataset
from hybridrl.data.loader import LabelledLoader, PaddedLoader, PairLoader, PromptLoader, RowDataset, SFTLoader
from hybridrl.data.preference_dataset import PreferenceDataset
from hybridrl.data.rl_dataset import RLHFDataset
from hybridrl.data.row_selection import seed_of
from hybridrl.data.samplers import EpochSampler
from hybridrl.data.sft_dataset import SFTDataset
from hybridrl.data.source_mixture import MixtureSampler, check_sources, items_by_source
from hybridrl.errors import DataError
from hybridrl.utils.user_code import load_class

if TYPE_CHECKING:
    from torch.utils.data import Sampler
    from transformers import PreTrainedTokenizerBase

    from hybridrl.config import (
        DataConfig,
        LabelledDataConfig,
        PairsDataConfig,
        PromptConfig,
        SFTDataConfig,
        SupervisedDataConfig,
    )
    from hybridrl.models.vision import ImageProcessor

Files = str | Path | Sequence[str | Path]


def create_rl_dataset(
    files: Files,
    config: PromptConfig,
    tokenizer: PreTrainedTokenizerBase,
    max_samples: int = -1,
    key: str = "data.train_files",
    processor: ImageProcessor | None = None,
) -> RowDataset:
    """Create the prompts of `files`: an `RLHFDataset`, or the class that `data.custom_cls.{path,name}` names.

    Args:
        files: one or several paths.
        config: `DataConfig` or `GenerationDataConfig`.
        tokenizer: a tokenizer with a chat template.
        max_samples: number of rows to use; -1 uses all.
        key: the configuration key that named the files, for messages.
        processor: prepares images, for a vision-language model.

    Raises:
        DataError: the files or rows cannot be used, or the class cannot be loaded.
    """
    return _create(files, config, tokenizer, max_samples, key, RLHFDataset, processor)


def create_sft_dataset(
    files: Files,
    config: SFTDataConfig,
    tokenizer: PreTrainedTokenizerBase,
    max_samples: int = -1,
    key: str = "data.train_files",
    processor: ImageProcessor | None = None,
) -> RowDataset:
    """Create the conversations of `files`: an `SFTDataset`, or the class that `data.custom_cls.{path,name}` names.

    Arguments and errors are those of `create_rl_dataset`.
    """
    return _create(files, config, tokenizer, max_samples, key, SFTDataset, processor)


def create_preference_dataset(
    files: Files,
    config: PairsDataConfig,
    tokenizer: PreTrainedTokenizerBase,
    max_samples: int = -1,
    key: str = "data.train_files",
    processor: ImageProcessor | None = None,
) -> RowDataset:
    """Create the pairs of `files`: a `PreferenceDataset`, or the class that `data.custom_cls.{path,name}` names.

    Arguments and errors are those of `create_rl_dataset`.
    """
    return _create(files, config, tokenizer, max_samples, key, PreferenceDataset, processor)


def create_labelled_dataset(
    files: Files,
    config: LabelledDataConfig,
    tokenizer: PreTrainedTokenizerBase,
    max_samples: int = -1,
    key: str = "data.train_files",
    processor: ImageProcessor | None = None,
) -> RowDataset:
    """Create the labelled answers of `files`: a `LabelledDataset`, or the class that `data.custom_cls` names.

    Arguments and errors are those of `create_rl_dataset`.
    """
    return _create(files, config, tokenizer, max_samples, key, LabelledDataset, processor)


def _create(
    files: Files,
    config: Any,
    tokenizer: PreTrainedTokenizerBase,
    max_samples: int,
    key: str,
    default: type[RLHFDataset] | type[SFTDataset] | type[PreferenceDataset] | type[LabelledDataset],
    processor: ImageProcessor | None = None,
) -> RowDataset:
    custom = config.custom_cls
    cls: Any = default
    if custom is not None and custom.path is not None:
        cls = load_class(custom.path, custom.name, "data.custom_cls.path", "data.custom_cls.name", error=DataError)
    elif processor is None:
        _check_media_keys(config)
    signature = inspect.signature(cls)
    arguments: dict[str, Any] = {
        "data_files": files,
        "tokenizer": tokenizer,
        "config": config,
        "max_samples": max_samples,
    }
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in signature.parameters.values())
    if issubclass(cls, default) and (takes_all or "key" in signature.parameters):
        arguments["key"] = key
    if "processor" in signature.parameters:
        arguments["processor"] = processor
    elif processor is not None and not takes_all:
        raise DataError(
            f"data.custom_cls: {cls.__name__} has no parameter processor, so it cannot prepare images for a "
            f"vision-language model. Add processor=None to its parameters, and pass it on to {default.__name__}."
        )
    elif processor is not None:
        arguments["processor"] = processor
    try:
        signature.bind(**arguments)
    except TypeError as error:
        raise DataError(
            f"data.custom_cls: {cls.__name__} in {custom.path} is not made for this use ({error}). It is called as "
            f"{cls.__name__}(data_files=, tokenizer=, config=, max_samples=); the simplest is to derive it from "
            f"hybridrl.data.{default.__name__}."
        ) from error
    return cls(**arguments)


def _check_media_keys(config: Any) -> None:
    """Refuse columns of images and videos for a model that reads text."""
    for name in ("image_key", "video_key"):
        field = type(config).__dataclass_fields__.get(name)
        if field is not None and getattr(config, name) not in (None, default_of(field)):
            raise DataError(
                f"data.{name}={getattr(config, name)} has no effect, because the model reads text alone. Remove it, or "
                "take a vision-language model"
            )


def create_sampler(config: DataConfig | SupervisedDataConfig, dataset: RowDataset, batch_size: int = 1) -> Sampler:
    """Create the training order.

    That is `EpochSampler`; with `data.mixture` `MixtureSampler` or `CurriculumSampler`; or the class that
    `data.sampler.{class_path,class_name}` names. A custom class is called as
    `cls(data_source=dataset, data_config=config)`. `StatefulLoader` describes its optional methods.

    Args:
        batch_size: rows per batch; an epoch of a mixture is a whole number of batches.

    Raises:
        DataError: the class cannot be loaded, or cannot be called this way; or the mixture does not fit the data.
    """
    custom = getattr(config, "sampler", None)
    if config.mixture.weights:
        return _create_mixture(config, dataset, batch_size)
    if custom is None or custom.class_path is None:
        return EpochSampler(len(dataset), shuffle=config.shuffle, seed=seed_of(config))
    cls = load_class(
        custom.class_path, custom.class_name, "data.sampler.class_path", "data.sampler.class_name", error=DataError
    )
    arguments: dict[str, Any] = {"data_source": dataset, "data_config": config}
    try:
        inspect.signature(cls).bind(**arguments)
    except TypeError as error:
        raise DataError(
            f"data.sampler: {cls.__name__} in {custom.class_path} is not made for this use ({error}). "
            f"It is called as {cls.__name__}(data_source=, data_config=)."
        ) from error
    return cls(**arguments)


def _create_mixture(config: DataConfig | SupervisedDataConfig, dataset: RowDataset, batch_size: int) -> MixtureSampler:
    mixture = config.mixture
    weights = {str(name): float(weight) for name, weight in mixture.weights.items()}
    items = items_by_source(dataset, mixture.column)
    check_sources(weights, items)
    rows = sum(len(items[name]) for name, weight in weights.items() if weight)
    if rows < batch_size:
        raise DataError(
            f"data.mixture.weights: the sources that it draws have {rows} rows, and a batch has {batch_size}, so that "
            f"no epoch has a batch. Lower data.train_batch_size to at most {rows}, or supply more rows."
        )
    indices = dataset.item_ids if isinstance(dataset, LabelledDataset) else dataset.indices  # type: ignore[attr-defined]
    seed = seed_of(config)
    curriculum = getattr(mixture, "curriculum", None)
    if curriculum is None or curriculum.name == "fixed":
        return MixtureSampler(items, indices, weights, batch_size, shuffle=config.shuffle, seed=seed)
    return CurriculumSampler(
        items, indices, weights, batch_size, settings=curriculum, shuffle=config.shuffle, seed=seed
    )


def create_train_loader(config: DataConfig, dataset: RowDataset, batch_size: int | None = None) -> PromptLoader:
    """Load training prompts in full batches of `batch_size` (default: `data.train_batch_size`)."""
    batch_size = batch_size or config.train_batch_size
    return PromptLoader(
        dataset,
        batch_size,
        create_sampler(config, dataset, batch_size),
        drop_last=True,
        num_workers=config.dataloader_num_workers,
        seed=seed_of(config),
    )


def create_val_loader(config: DataConfig, dataset: RowDataset) -> PromptLoader:
    """Load validation prompts in batches of `data.val_batch_size` (default: all at once), every row once.

    Each pass has the same order and the same uids, however many passes came before, so that a resumed run validates
    exactly like an uninterrupted one.
    """
    size = config.val_batch_size or len(dataset)
    sampler = EpochSampler(len(dataset), shuffle=config.validation_shuffle, seed=seed_of(config))
    return PromptLoader(
        dataset,
        size,
        sampler,
        drop_last=False,
        num_workers=config.dataloader_num_workers,
        seed=seed_of(config),
        every_epoch_alike=True,
        key="data.val_batch_size",
    )


def create_sft_loader(
    config: SFTDataConfig,
    dataset: RowDataset,
    batch_size: int,
    *,
    train: bool = True,
    key: str = "data.train_batch_size",
) -> SFTLoader:
    """Load conversations for training (in the sampler's order, full batches) or validation (each row once)."""
    loader = _create_loader(SFTLoader, config, dataset, batch_size, train, key)
    assert isinstance(loader, SFTLoader)
    return loader


def create_pair_loader(
    config: PairsDataConfig,
    dataset: RowDataset,
    batch_size: int,
    *,
    train: bool = True,
    key: str = "data.train_batch_size",
) -> PairLoader:
    """Load pairs for training (in the sampler's order, full batches) or validation (each pair once)."""
    loader = _create_loader(PairLoader, config, dataset, batch_size, train, key)
    assert isinstance(loader, PairLoader)
    return loader


def create_labelled_loader(
    config: LabelledDataConfig,
    dataset: RowDataset,
    batch_size: int,
    *,
    train: bool = True,
    key: str = "data.train_batch_size",
) -> LabelledLoader:
    """Load labelled answers for training (in the sampler's order, full batches) or validation (each row once)."""
    loader = _create_loader(LabelledLoader, config, dataset, batch_size, train, key)
    assert isinstance(loader, LabelledLoader)
    return loader


def _create_loader(
    cls: type[PaddedLoader], config: SupervisedDataConfig, dataset: RowDataset, batch_size: int, train: bool, key: str
) -> PaddedLoader:
    sampler = (
        create_sampler(config, dataset, batch_size) if train else EpochSampler(len(dataset), shuffle=False, seed=0)
    )
    return cls(
        dataset,
        batch_size,
        sampler,
        drop_last=train,
        num_workers=config.num_workers,
        seed=seed_of(config),
        every_epoch_alike=not train,
        key=key,
    )
