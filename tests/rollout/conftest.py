"""Fixtures of these tests: an engine with a server, and pools of two replicas of the plain engine."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray
import torch
from plain_engine import HANGS_VARIABLE, WAITS_VARIABLE
from pool_tools import ENGINE, until_ready
from server_stage import Stage

from hybridrl.config import load_config
from hybridrl.hybrid_engine.stream import stream
from hybridrl.hybrid_engine.transports import SharedMemoryTransport
from hybridrl.rollout.inference_engine import EngineSpec
from hybridrl.rollout.replicas.replica_handle import PoolSettings, ReplicaPlacement
from hybridrl.rollout.replicas.replica_places import ReplicaPlaces
from hybridrl.rollout.replicas.replica_supervisor import Supervisor
from hybridrl.single_controller import RayResourcePool


@pytest.fixture(scope="module")
def stage(micro_model: Path) -> Iterator[Stage]:
    stage = Stage(micro_model)
    yield stage
    stage.close()


@pytest.fixture(scope="module")
def slots(ray_session):
    pool = RayResourcePool([2], use_gpu=False)
    yield pool.slots()
    pool.release()


@pytest.fixture(scope="module")
def model(micro_model):
    """The trainer's model, whose weights tests change."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(micro_model, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def make_pool(slots, micro_model, model, tmp_path_factory):
    """Makes pools of two replicas of the plain engine that get their weights from `model`."""
    made = []

    def make(
        replicas: int = 2,
        devices: tuple[int, ...] = (),
        hangs: str = "/nowhere",
        waits: str = "/",
        join_environment: dict[str, str] | None = None,
        **changes,
    ) -> Supervisor:
        config = load_config(
            "ppo_trainer",
            overrides=[
                f"actor_rollout_ref.model.path={micro_model}",
                "actor_rollout_ref.rollout.prompt_length=16",
                "actor_rollout_ref.rollout.response_length=112",
                "actor_rollout_ref.rollout.max_num_seqs=64",
            ],
        ).actor_rollout_ref
        node = ray.get_runtime_context().get_node_id()
        path = {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), os.environ["PYTHONPATH"]])}
        path |= {HANGS_VARIABLE: hangs, WAITS_VARIABLE: waits}
        places = [
            ReplicaPlacement(group, bundle, node, ranks=(rank,), environment=path, devices=devices)
            for rank, (group, bundle) in enumerate(slots[:replicas])
        ]
        spec = EngineSpec(config.rollout, config.model, eos_token_ids=(5,), pad_token_id=0)
        settings = PoolSettings(ENGINE, spec, log_folder=tmp_path_factory.mktemp("logs"), **changes)

        def send(targets):
            size = sum(p.numel() * 4 for p in model.parameters())
            return [stream(model.named_parameters(), [SharedMemoryTransport(targets)], size, bucket_bytes=2**14)]

        further = path if join_environment is None else join_environment
        joining = ReplicaPlaces(
            [{"CPU": 1.0}], lambda slots: ReplicaPlacement(*slots[0], node, environment=further, devices=devices)
        )
        pool = Supervisor(settings, places, send, joining if settings.bounds is not None else None)
        made.append(pool)
        pool.start()
        pool.update_weights(0)
        return pool

    yield make
    for pool in made:
        pool.close()


@pytest.fixture(scope="module")
def shared_pool(make_pool):
    """One that all tests share which leave it whole."""
    return make_pool()


@pytest.fixture
def pool(shared_pool):
    """The shared one, idle and ready again behind a test that failed in between."""
    yield shared_pool
    shared_pool.scheduler.abort()
    shared_pool.resume()
    shared_pool.unpause()
    until_ready(shared_pool)
