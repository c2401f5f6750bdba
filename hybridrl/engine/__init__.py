"""Training engines: a model that learns, saves and hands its weights out, behind one interface."""

from hybridrl.engine.train_engine import Engine, MicroBatching, NonFiniteError, TrainEngines

__all__ = ["Engine", "TrainEngines", "MicroBatching", "NonFiniteError"]
