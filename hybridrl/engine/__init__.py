"""Training engines: a model that learns, saves and hands its weights out, behind one interface."""

from hybridrl.engine.base import Engine, EngineRegistry, MicroBatching, NonFiniteError

__all__ = ["Engine", "EngineRegistry", "MicroBatching", "NonFiniteError"]
