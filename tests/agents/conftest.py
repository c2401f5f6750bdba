"""A rollout of sessions over a model in the test's process."""

from pathlib import Path
from types import SimpleNamespace

import pytest
from rollout_stage import ECHO, Recorded, config_for
from template_families import write_model

from hybridrl.agents import AgentRollout, create_agents
from hybridrl.engine.train_engine import create_train_engine
from hybridrl.models.info import eos_token_ids, tokenizer_of
from hybridrl.models.model_config import config_of
from hybridrl.registry import import_external_lib
from hybridrl.rollout import HFRollout, InPlaceRollout


@pytest.fixture(scope="module")
def model(micro_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    import_external_lib(str(ECHO))
    return write_model(micro_model, tmp_path_factory.mktemp("families"))


@pytest.fixture(scope="module")
def engine(model: Path):
    settings = config_for(model, "").actor_rollout_ref
    engine = create_train_engine("language_model", "fsdp2", model=settings.model, engine=settings.actor.fsdp_config)
    engine.initialize()
    return engine


@pytest.fixture
def started(engine):
    """Makes a rollout of agents over the engine; ends it afterwards."""
    made = []

    def start(config, *datasets) -> tuple[AgentRollout, Recorded]:
        policy, tokenizer = config.actor_rollout_ref, tokenizer_of(config.actor_rollout_ref.model)
        ends = eos_token_ids(policy.model.path, config_of(policy.model), tokenizer)
        local = HFRollout(policy.rollout, engine, ends, tokenizer.pad_token_id, tokenizer)
        inner = InPlaceRollout(SimpleNamespace(generate_sequences=local.generate, world_size=1), policy.rollout)
        inner.update_weights(0)
        recorded = Recorded(inner.client())
        inner.client = lambda: recorded
        agents = create_agents(config, tokenizer, datasets)
        assert agents is not None
        made.append(AgentRollout(inner, agents))
        return made[-1], recorded

    yield start
    for rollout in made:
        rollout.close()
