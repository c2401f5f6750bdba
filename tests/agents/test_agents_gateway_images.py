"""Images of agents behind the server: the trainer sees the very patches that the sampler saw, in every dialect."""

import base64
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest
import torch
from gateway_stage import TOKEN, SeeingStage
from PIL import Image
from seeing_agents import OTHER, SHOWN, block_of, url_of
from serving_stage import serving
from transformers import AutoImageProcessor
from vision_stage import check_seen
from vision_tools import PROMPTS, dataset_of, peer_inputs, picture, pictures, png, write_prompts

from hybridrl.config import ModelConfig, load_config
from hybridrl.data import PromptLoader
from hybridrl.engine.train_engine import create_train_engine
from hybridrl.errors import RolloutError
from hybridrl.models.model_config import config_of
from hybridrl.models.vision import digest, tokens_per_image
from hybridrl.processes.peer import JSON
from hybridrl.protocol import object_array
from hybridrl.rollout.request_images import split_images
from hybridrl.rollout.trace import read_trace, trajectories_of
from hybridrl.serve import server_messages
from hybridrl.serve.conversation import inner_messages
from hybridrl.serve.schema import ApiError
from hybridrl.trainer.ppo.responses import respond

ROLLOUT = "actor_rollout_ref.rollout"


# ------------------------------------------------------------------ a real model and a real server process


def config_for(model: Path, *more: str) -> Any:
    words = {
        "actor_rollout_ref.model.path": model,
        "data.max_prompt_length": 200,
        "data.max_response_length": 200,
        f"{ROLLOUT}.name": "hf",
        f"{ROLLOUT}.server.enable": True,
        f"{ROLLOUT}.server.host": "127.0.0.1",
        f"{ROLLOUT}.agent.default_agent_loop": "gateway_agent",
        f"{ROLLOUT}.agent.function": f"{Path(__file__).with_name('seeing_agents.py')}:by_kind",
        f"{ROLLOUT}.agent.timeout_s": 60,
        f"{ROLLOUT}.agent.on_error": "raise",
    }
    return load_config("ppo_trainer", [*(f"{name}={value}" for name, value in words.items()), *more])


@pytest.mark.usefixtures("forked_children")
@pytest.mark.slow(25)  # it starts the server's process
def test_trained_on_what_was_seen(vision_models: dict[str, Path], tmp_path: Path) -> None:
    """Images of prompts and of tools' answers, of three dialects; a changed image begins another conversation."""
    model, traces = vision_models["qwen3_vl"], tmp_path / "traces"
    config = config_for(model, f"{ROLLOUT}.agent.trace_dir={traces}")
    policy = config.actor_rollout_ref
    engine = create_train_engine("language_model", "fsdp2", model=policy.model, engine=policy.actor.fsdp_config)
    engine.initialize()
    dataset = dataset_of(write_prompts(tmp_path), model)
    with serving(config, engine, dataset) as (rollout, calls):
        prompts = next(iter(PromptLoader(dataset, len(dataset))))
        kinds = ["chat", "responses", "messages", "chat", "messages"]
        prompts.non_tensor_batch["kind"] = object_array(kinds)
        batch = respond(rollout, prompts, 1.0, global_steps=1)
        calls.calls.clear()
        deadline = time.monotonic() + 60
        while rollout.server.process.images:  # the run keeps no image of a session that is over
            assert time.monotonic() < deadline
            time.sleep(0.02)
    tool, other = picture(SHOWN, OTHER), picture((16, 16), 99)
    expected = []
    for kind, own in zip(kinds, pictures(), strict=True):
        expected.append([*own, tool])
        if kind == "chat" and own:
            expected.append([other, *own[1:], tool])
    assert [len(one) for one in expected] == [2, 2, 2, 1, 3, 3, 3]
    check_seen(engine, model, batch, expected)
    # the rows of one session: the turns before the change are trained on in the first alone
    assert batch.batch["response_mask"].sum(dim=1).tolist() == [8, 4, 8, 8, 8, 4, 8]
    assert images_named(batch.non_tensor_batch["session_log"][0]["messages"]) == peer_digests(model, [other, tool])
    turns = read_trace(next(traces.glob("0-0-0-*.json")))["turns"]
    assert [[one["digest"] for one in turn["metadata"]["images"]] for turn in turns] == [
        peer_digests(model, images) for images in ([pictures()[0][0]], [pictures()[0][0], tool], [other, tool])
    ]


def peer_digests(model: Path, images: list[Image.Image]) -> list[str]:
    """The digests of what transformers makes of images."""
    processor = AutoImageProcessor.from_pretrained(model, backend="pil")
    return [digest(dict(processor(images=[image], return_tensors="pt"))) for image in images]


def images_named(messages: list[dict[str, Any]]) -> list[str]:
    parts = [part for one in messages if isinstance(one["content"], list) for part in one["content"]]
    return [part["digest"] for part in parts if part["type"] == "image"]


# ------------------------------------------------------------------ a scripted model


@pytest.fixture(scope="module")
def model(vision_models: dict[str, Path]) -> Path:
    return vision_models["qwen2_5_vl"]


@pytest.fixture(scope="module")
def shared(model: Path) -> Iterator[SeeingStage]:
    stage = SeeingStage(model, most=3, limit=400)
    yield stage
    stage.close()


@pytest.fixture
def stage(shared: SeeingStage) -> Iterator[SeeingStage]:
    shared.model.calls.clear()
    shared.model.requests.clear()
    shared.model.texts = []
    yield shared
    shared.close_sessions()


def part_of(image: Image.Image, kind: str = "PNG") -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url_of(image, kind)}}


def chat_of(stage: SeeingStage, session: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{stage.root}/sessions/{session}/v1", api_key="-", max_retries=0)


def ask(stage: SeeingStage, session: str, messages: list[Any], **more: Any) -> Any:
    return chat_of(stage, session).chat.completions.create(model="m", messages=messages, **more).choices[0].message


def test_prompts_are_those_of_transformers(stage: SeeingStage, model: Path) -> None:
    """Text and images of the data's prompts, rendered and placed by transformers' own processor."""
    for row, ((text, _), images) in enumerate(zip(PROMPTS, pictures(), strict=True)):
        waiting = iter(images)
        pieces = [piece for piece in re.split("(<image>)", text) if piece]
        content = [part_of(next(waiting)) if one == "<image>" else {"type": "text", "text": one} for one in pieces]
        ask(stage, stage.open(), [{"role": "user", "content": content}])
        request, peer = stage.model.requests[-1], peer_inputs(model, row)
        assert request.prompt_ids == peer["input_ids"][0].tolist()
        assert (request.images is None) == (not images)
        if request.images is not None:
            for name in ("pixel_values", "image_grid_thw"):
                torch.testing.assert_close(request.images.tensors[name], peer[name])


def test_an_image_is_the_same_by_what_the_model_reads_of_it(stage: SeeingStage) -> None:
    """The same pixels in another file go on; another image of the same size, and so of equal tokens, forks."""
    one, two, session = picture((16, 16), 1), picture((16, 16), 2), stage.open()
    first = [{"role": "user", "content": [part_of(one)]}]
    said = ask(stage, session, first)
    known = [*stage.model.calls[0][0], *stage.model.calls[0][1].token_ids]
    later = [said, {"role": "user", "content": [part_of(two), {"type": "text", "text": "?"}]}]
    ask(stage, session, [{"role": "user", "content": [part_of(one, "WEBP")]}, *later])
    assert stage.model.requests[1].prompt_ids[: len(known)] == known
    ask(stage, session, [{"role": "user", "content": [part_of(two)]}, *later])
    before, after = stage.model.requests[1:]
    assert before.prompt_ids == after.prompt_ids and before.images.digests() != after.images.digests()
    about = stage.http.get(f"/sessions/{session}").json()
    assert (about["turns"], about["branches"]) == (3, 2)
    trace = stage.trace(session)
    assert [turn["metadata"]["parent"] for turn in trace["turns"]] == [None, "turn-0", None]
    assert images_named(trace["turns"][1]["request"]["messages"]) == before.images.digests()
    with pytest.raises(RolloutError, match="keeps the digests alone"):
        trajectories_of(trace)


def test_tokens_of_images_are_not_made_by_text(stage: SeeingStage) -> None:
    """Neither what the policy wrote nor what a client says stands for an image."""
    token = stage.tokenizer.convert_tokens_to_ids("<|image_pad|>")
    session, image = stage.open(), picture((16, 16), 3)
    stage.model.texts = ["I see <|image_pad|>"]
    messages: list[Any] = [{"role": "user", "content": [{"type": "text", "text": "no <|image_pad|>"}, part_of(image)]}]
    said = ask(stage, session, messages)
    assert token in stage.model.calls[0][1].token_ids
    messages += [said, {"role": "user", "content": [part_of(image)]}, {"role": "assistant", "content": "<|image_pad|>"}]
    ask(stage, session, messages, extra_body={"continue_final_message": True, "add_generation_prompt": False})
    request = stage.model.requests[1]
    of_images = {place for first, count in request.images.places for place in range(first, first + count)}
    assert len(of_images) == 8
    others = [place for place, one in enumerate(request.prompt_ids) if one == token and place not in of_images]
    assert len(others) == 1 and others[0] >= len(stage.model.calls[0][0])
    assert request.prompt_ids[: others[0] + 1] == [*stage.model.calls[0][0], *stage.model.calls[0][1].token_ids[:-1]]


def test_a_stream_and_a_client_without_session_see_images(stage: SeeingStage) -> None:
    image = picture((24, 16), 5)
    client = openai.OpenAI(base_url=f"{stage.root}/v1", api_key=TOKEN, max_retries=0)
    asked: Any = {"model": "tiny", "messages": [{"role": "user", "content": [part_of(image)]}]}
    whole = client.chat.completions.create(**asked)
    assert "".join(one.choices[0].delta.content or "" for one in client.chat.completions.create(**asked, stream=True))
    assert whole.usage.prompt_tokens == len(stage.model.requests[0].prompt_ids)
    claude = anthropic.Anthropic(base_url=f"{stage.root}/sessions/{stage.open()}", api_key="-", max_retries=0)
    messages: Any = [{"role": "user", "content": [block_of(url_of(image))]}]
    assert claude.messages.count_tokens(model="m", messages=messages).input_tokens == whole.usage.prompt_tokens
    assert len({request.images.digest() for request in stage.model.requests}) == 1


# ------------------------------------------------------------------ what is refused


BROKEN = "data:image/png;base64," + base64.b64encode(png(picture((64, 64), 1))[:200]).decode()


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("https://example.com/cat.png", "addresses, files and uploads are not read"),
        ("file:///etc/hostname", "addresses, files and uploads are not read"),
        ("/etc/hostname", "addresses, files and uploads are not read"),
        ("data:image/png,abc", "data:image/png;base64,..."),
        ("data:text/html;base64,AAAA", "data:image/png;base64,..."),
        ("data:image/png;base64,?", "base64 data"),
        ("data:image/svg+xml;base64,AAAA", "message 0, image 0: an image cannot be read"),
        (url_of(picture((16, 16), 1), "BMP"), "read as PNG, JPEG, WEBP, GIF"),
        (BROKEN, "an image cannot be read"),
        (url_of(Image.new("1", (1, 4000))), "which the model does not take"),
        (url_of(Image.new("1", (8000, 8000))), "8000 x 8000 pixels; the limit is"),
    ],
)
def test_images_that_cannot_be_taken(stage: SeeingStage, url: str, words: str) -> None:
    messages: Any = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}]
    with pytest.raises(openai.BadRequestError, match=re.escape(words)):
        ask(stage, stage.open(), messages)
    blocks: Any = [{"type": "image", "source": {"type": "url", "url": url}}]
    claude = anthropic.Anthropic(base_url=f"{stage.root}/sessions/{stage.open()}", api_key="-", max_retries=0)
    with pytest.raises(anthropic.BadRequestError, match=re.escape(words)):
        claude.messages.create(model="m", max_tokens=5, messages=[{"role": "user", "content": blocks}])
    with pytest.raises(openai.BadRequestError, match=re.escape(words)):
        parts: Any = [{"type": "input_image", "image_url": url}]
        chat_of(stage, stage.open()).responses.create(model="m", input=[{"role": "user", "content": parts}])
    assert not stage.model.requests


def test_limits(stage: SeeingStage, model: Path) -> None:
    image, large = picture((16, 16), 1), picture((64, 64), 1)

    def refused(role: str, parts: list[Any]) -> str:
        with pytest.raises(openai.APIStatusError) as caught:
            ask(stage, stage.open(), [{"role": role, "content": parts}])
        return str(caught.value)

    assert "more than 3 images (actor_rollout_ref.rollout.limit_images)" in refused("user", [part_of(image)] * 4)
    assert "leave images out of its messages" in refused("assistant", [part_of(image)])
    low = {"type": "image_url", "image_url": {"url": url_of(image), "detail": "low"}}
    assert "detail='low'" in refused("user", [low])
    assert "the session has no image of digest 'x'" in refused("user", [{"type": "image", "digest": "x"}])
    ask(stage, stage.open(), [{"role": "user", "content": [part_of(large)] * 3}])  # 64 tokens each
    assert stage.http.post("/v1/chat/completions", content=b" " * (9 * 2**20)).status_code == 400
    small = SeeingStage(model, limit=150)
    try:
        with pytest.raises(openai.BadRequestError, match=r"message 0, image 2 has 64 tokens.*may have 150"):
            ask(small, small.open(), [{"role": "user", "content": [part_of(large)] * 3}])
    finally:
        small.close()


def test_a_model_of_text_refuses_images() -> None:
    with pytest.raises(ApiError, match="only text is supported"):
        inner_messages([{"role": "user", "content": [part_of(picture((16, 16), 1))]}])


# ------------------------------------------------------------------ between the processes


def test_patches_pass_between_the_processes_bit_by_bit(model: Path) -> None:
    """And whatever the server's process says, only images that fit the prompt reach an engine."""
    config = config_of(ModelConfig(path=str(model)))
    token, images = config.image_token_id, [peer_inputs(model, row) for row in (0, 3)]
    tensors = {name: torch.cat([one[name] for one in images]) for name in ("pixel_values", "image_grid_thw")}
    known = {}
    for number, one in enumerate(split_images(tensors)):
        passed = JSON.decode(JSON.encode({"image": server_messages.image_to_plain(one)}))["image"]
        known[number] = server_messages.image_from_plain(passed, config)
    counts = tokens_per_image(config, tensors["image_grid_thw"]).tolist()
    ids = [5, *[token] * counts[0], 6, *[token] * sum(counts[1:])]
    places = [[1, counts[0]], [2 + counts[0], counts[1]], [2 + counts[0] + counts[1], counts[2]]]
    found = server_messages.images_from_plain({"numbers": [0, 1, 2], "places": places}, ids, known, config)
    assert found.digest() == digest(tensors)
    for wrong in (
        {"numbers": [0, 1], "places": places},
        {"numbers": [0, 1, 9], "places": places},
        {"numbers": [0, 1, 2], "places": [[0, counts[0]], *places[1:]]},
        {"numbers": [0, 2, 1], "places": places},
        {"numbers": [0, 1, 2], "places": [*places[:2], [len(ids) - 1, counts[2]]]},
    ):
        with pytest.raises((ValueError, KeyError)):
            server_messages.images_from_plain(wrong, ids, known, config)
    for grid in ([1, 3, 2], [1, 2], [1, 0, 2], [1, 2, 4]):
        with pytest.raises((ValueError, RuntimeError)):
            server_messages.image_from_plain({"grid": grid, "patches": b"\0" * 4}, config)
