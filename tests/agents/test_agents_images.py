"""Sessions in which tools, environments and loops show images: what is trained on is what was sampled and seen."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from raising import raises_with
from vision_stage import check_seen
from vision_tools import (
    SIZES,
    dataset_of,
    picture,
    pictures,
    prompts_of,
    tool_pictures,
    write_prompts,
    write_video_prompts,
)

from hybridrl.agents import AgentRollout, ToolResponse, create_agents, register
from hybridrl.config import load_config
from hybridrl.engine.batch_images import BatchImages
from hybridrl.engine.microbatch import MicroBatching
from hybridrl.engine.train_engine import create_train_engine
from hybridrl.errors import RolloutError
from hybridrl.models.info import eos_token_ids, tokenizer_of
from hybridrl.models.model_config import config_of
from hybridrl.protocol import DataProto
from hybridrl.registry import AGENT_LOOPS, import_external_lib
from hybridrl.rollout import HFRollout, InPlaceRollout
from hybridrl.trainer.ppo.correction import probe_prompts
from hybridrl.trainer.ppo.responses import respond

TOOLS = Path(__file__).with_name("image_tools.py")
ROLLOUT = "actor_rollout_ref.rollout"


def config_for(model: Path, *more: str):
    return load_config(
        "ppo_trainer",
        [
            f"actor_rollout_ref.model.path={model}",
            f"actor_rollout_ref.model.external_lib={TOOLS}",
            "data.max_prompt_length=200",
            "data.max_response_length=300",
            f"{ROLLOUT}.multi_turn.enable=True",
            f"{ROLLOUT}.multi_turn.function_tool_path={TOOLS}",
            f"{ROLLOUT}.multi_turn.format=two_snaps",
            f"{ROLLOUT}.multi_turn.max_parallel_calls=2",
            f"{ROLLOUT}.multi_turn.max_tool_response_length=4",  # shorter than a placeholder
            f"{ROLLOUT}.multi_turn.max_assistant_turns=4",
            f"{ROLLOUT}.agent.on_error=raise",
            f"{ROLLOUT}.agent.num_workers=0",  # tests change loops in this process
            f"{ROLLOUT}.stop=[{','.join('ABCDEFGHIJKLMNOPQ')}]",  # a random model rarely ends a turn
            *more,
        ],
    )


class Started:
    """Agents over a model that generates in place."""

    def __init__(self, model: Path) -> None:
        import_external_lib(str(TOOLS))
        self.model, policy = model, config_for(model).actor_rollout_ref
        self.engine = create_train_engine(
            "language_model", "fsdp2", model=policy.model, engine=policy.actor.fsdp_config
        )
        self.engine.initialize()

    def __call__(self, *words: str) -> AgentRollout:
        config = config_for(self.model, *words)
        policy, tokenizer = config.actor_rollout_ref, tokenizer_of(config.actor_rollout_ref.model)
        ends = eos_token_ids(policy.model.path, config_of(policy.model), tokenizer)
        local = HFRollout(policy.rollout, self.engine, ends, tokenizer.pad_token_id, tokenizer)
        inner = InPlaceRollout(SimpleNamespace(generate_sequences=local.generate, world_size=1), policy.rollout)
        inner.update_weights(0)
        agents = create_agents(config, tokenizer, [])
        assert agents is not None
        return AgentRollout(inner, agents)


@pytest.fixture(scope="module", params=["qwen2_5_vl", "qwen3_vl"])
def started(request: pytest.FixtureRequest, vision_models: dict[str, Path]) -> Started:
    return Started(vision_models[request.param])


@pytest.fixture(scope="module")
def prompts(started: Started, tmp_path_factory: pytest.TempPathFactory) -> DataProto:
    found = prompts_of(write_prompts(tmp_path_factory.mktemp("data")), started.model)
    found.meta_info = {"global_steps": 1}
    return found


def answered(started: Started, prompts: DataProto, *words: str) -> DataProto:
    rollout = started(*words)
    try:
        return respond(rollout, prompts, 1.0, global_steps=1)
    finally:
        rollout.close()


def test_images_of_tools_are_trained_on_as_they_were_sampled(started: Started, prompts: DataProto) -> None:
    """Parallel calls, of which the first is answered last; an answer that quotes a placeholder."""
    batch = answered(started, prompts)
    expected = []
    for own, log in zip(pictures(), batch.non_tensor_batch["session_log"], strict=True):
        seeds = [event["arguments"]["seed"] for event in log["events"] if event["kind"] == "tool"]
        expected.append(own + [image for seed in seeds for image in tool_pictures(seed)])
    width, before = batch.batch["prompts"].shape[1], [len(own) for own in pictures()]
    for row, images in enumerate(expected):  # answers that did not fit are not there
        merged = [
            len(one["image_grid_thw"]) if one else 0 for one in [batch.non_tensor_batch["multi_modal_inputs"][row]]
        ]
        expected[row] = images[: merged[0]]
    assert sum(map(len, expected)) >= sum(before) + 15
    assert batch.batch["image_mask"][:, width:].any(dim=1).all()
    assert not any(batch.non_tensor_batch["tool_faults"])
    check_seen(started.engine, started.model, batch, expected)
    again = probe_prompts(batch, prompts.non_tensor_batch).non_tensor_batch["multi_modal_inputs"]
    assert [len(one["image_grid_thw"]) if one else 0 for one in again] == before


def test_images_pass_through_worker_processes(started: Started, prompts: DataProto, ray_session: None) -> None:
    here, there = (answered(started, prompts, f"{ROLLOUT}.agent.num_workers={count}") for count in (0, 1))
    for name in ("input_ids", "image_mask", "position_ids", "rollout_log_probs"):
        torch.testing.assert_close(there.batch[name], here.batch[name])
    names = "image_digest", "uid"
    assert all(there.non_tensor_batch[name].tolist() == here.non_tensor_batch[name].tolist() for name in names)
    BatchImages(there, started.engine.config)


def test_images_in_another_order_end_training(started: Started, prompts: DataProto) -> None:
    batch = answered(started, prompts)
    column = batch.non_tensor_batch["multi_modal_inputs"]
    config = started.engine.config
    BatchImages(batch, config)
    grid = column[0]["image_grid_thw"]
    parts = column[0]["pixel_values"].split(grid.prod(-1).tolist())
    column[0] = {"pixel_values": torch.cat(parts[::-1]), "image_grid_thw": grid.flip(0)}
    with pytest.raises(ValueError, match="sequence 0: its images are not those"):
        BatchImages(batch, config)


def test_environments_show_images(started: Started, prompts: DataProto, tmp_path: Path) -> None:
    file = tmp_path / "environments.yaml"
    file.write_text("environments:\n  - {name: gallery, class_name: gallery}\n")
    words = [
        f"{ROLLOUT}.agent.default_agent_loop=env_agent",
        f"{ROLLOUT}.agent.environment_config_path={file}",
        f"{ROLLOUT}.agent.default_environment=gallery",
        f"{ROLLOUT}.agent.environment_turn_tokens=6",
    ]
    batch = answered(started, prompts, *words)
    views = [picture(SIZES[number % 3], number) for number in range(3)]
    assert batch.non_tensor_batch["env_done"].all()
    check_seen(started.engine, started.model, batch, [own + views for own in pictures()])
    states = batch.batch["turn_states"]
    assert all(len(set(row[row > 0].tolist())) == 3 for row in states)  # equal text, other images
    assert answered(started, prompts, *words).batch["turn_states"].tolist() == states.tolist()


def test_a_loop_that_loses_the_order_of_images_is_refused(
    started: Started, prompts: DataProto, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = [f"{ROLLOUT}.agent.default_agent_loop=looks_again", f"{ROLLOUT}.agent.retries=0", f"{ROLLOUT}.stop=[]"]
    batch = answered(started, prompts, *words)
    check_seen(started.engine, started.model, batch, [[*own, picture((16, 16), 77)] for own in pictures()])
    monkeypatch.setattr(AGENT_LOOPS.get("looks_again"), "swap", True)
    with raises_with(RolloutError, "multi_modal_data"):
        answered(started, prompts, *words)


def test_tokens_that_look_like_placeholders_are_plain(started: Started, prompts: DataProto) -> None:
    """The policy may write the placeholder's id; it stands for no image, in its own turn and in later ones."""

    class Writes(AGENT_LOOPS.get("looks_again")):
        async def run(self, sampling_params, **kwargs):
            token = started.engine.config.image_token_id
            generate = self.server_manager.client.generate

            async def forced(request):
                found = await generate(request)
                found.token_ids[1] = token
                return found

            self.server_manager.client = SimpleNamespace(generate=forced)
            return await super().run(sampling_params, **kwargs)

    register("writes_placeholders")(Writes)
    words = [f"{ROLLOUT}.agent.default_agent_loop=writes_placeholders", f"{ROLLOUT}.stop=[]"]
    batch = answered(started, prompts, *words)
    fields = batch.batch
    width = fields["prompts"].shape[1]
    token = fields["input_ids"] == started.engine.config.image_token_id
    plain = token & ~fields["image_mask"]
    assert plain[:, width:].sum(dim=1).tolist() == [2] * len(prompts)
    computed = started.engine.infer(batch, MicroBatching(size=3), 1.0, {"log_probs"})["log_probs"]
    lengths = fields["attention_mask"][:, width:].sum(dim=1)
    for row, length in enumerate(lengths.tolist()):
        first = length - 3  # of the second turn: what was sampled behind the token that the first turn wrote
        assert abs(float(computed[row, first] - fields["rollout_log_probs"][row, first])) < 1e-5


def test_rows_with_videos_are_refused_at_the_start(vision_models: dict[str, Path], tmp_path: Path) -> None:
    model = vision_models["qwen3_vl"]
    import_external_lib(str(TOOLS))
    config, rows = config_for(model), dataset_of(write_video_prompts(tmp_path), model)
    with raises_with(RolloutError, "data.video_key=videos"):
        create_agents(config, tokenizer_of(config.actor_rollout_ref.model), [rows])


def test_a_model_of_text_gets_no_images(micro_model: Path) -> None:
    assert ToolResponse(image=[picture((16, 16), 0)]).image
    with pytest.raises(RolloutError, match="video, which is not supported"):
        ToolResponse(video=[1])
    with pytest.raises(RolloutError, match="return a list"):
        ToolResponse(image=picture((16, 16), 0))  # type: ignore[arg-type]
