"""Training engines: a model that learns, saves and exports its weights, behind one interface."""

from hybridrl.engine.capabilities import ComparesVocabulary, ExportsShards, GeneratesInPlace, HasAdapters
from hybridrl.engine.micro_batched import MicroBatchedEngine
from hybridrl.engine.train_engine import (
    Engine,
    Geometry,
    MicroBatching,
    NonFiniteError,
    create_train_engine,
    register_train_engine,
    train_engine_class,
)

__all__ = [
    "Engine",
    "ExportsShards",
    "ComparesVocabulary",
    "GeneratesInPlace",
    "Geometry",
    "HasAdapters",
    "MicroBatchedEngine",
    "MicroBatching",
    "NonFiniteError",
    "create_train_engine",
    "register_train_engine",
    "train_engine_class",
]
