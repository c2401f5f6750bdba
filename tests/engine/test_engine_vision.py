"""Vision-language models in the engine and in place, against transformers' own forward pass."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from engine_helpers import make_engine, policy_loss, weights
from four_bit_tools import rounded_copy
from raising import raises_with
from ranks import spawn
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoImageProcessor, AutoModelForImageTextToText
from vision_tools import (
    PROMPTS,
    VIDEO_PROMPTS,
    peer_inputs,
    peer_video_inputs,
    prompts_of,
    write_prompts,
    write_video_prompts,
)

from hybridrl.config import RolloutConfig
from hybridrl.engine import MicroBatching
from hybridrl.errors import ModelError, RolloutError
from hybridrl.models.tokenizer import load_tokenizer
from hybridrl.models.vision import smallest_image
from hybridrl.models.vision_families import FAMILIES, register_vision_family
from hybridrl.protocol import DataProto, object_array
from hybridrl.registry import import_external_lib
from hybridrl.rollout.hf.rollout import HFRollout

RESPONSE = 6
SAMPLES = 3
#: two prompts of each rank: rank 0 has images only, rank 1 has text and images, in micro-batches of their own
MICRO = MicroBatching(size=2)


def sampled(engine, model: Path, file: Path, samples: int = SAMPLES) -> DataProto:  # type: ignore[no-untyped-def]
    """Responses to the prompts of a file by the engine's weights, as the learner gets them."""
    tokenizer = load_tokenizer(model)
    prompts = prompts_of(file, model).repeat(samples, interleave=True)
    prompts.non_tensor_batch["sample"] = object_array(list(range(samples)) * (len(prompts) // samples))
    rollout = HFRollout(
        RolloutConfig(response_length=RESPONSE, max_num_seqs=7),
        engine,
        [tokenizer.eos_token_id],
        tokenizer.pad_token_id,
    )
    batch = rollout.generate(prompts)
    batch.non_tensor_batch["multi_modal_inputs"] = prompts.non_tensor_batch["multi_modal_inputs"]
    generator = torch.Generator().manual_seed(1)
    batch.batch["advantages"] = torch.randn(batch.batch["responses"].shape, generator=generator)
    batch.meta_info["batch_num_tokens"] = int(batch.batch["response_mask"].sum())
    return batch


def peer_log_probs(model: Path, batch: DataProto, samples: int = SAMPLES, peer_of=peer_inputs) -> torch.Tensor:  # type: ignore[no-untyped-def]
    """[B, T] by transformers' own processor, positions and forward pass, one row at a time.

    As generation does it: the prompt with its images, then the response, where a placeholder's id is a plain token.
    """
    peer = AutoModelForImageTextToText.from_pretrained(model, attn_implementation="eager").eval()
    found = torch.zeros(batch.batch["responses"].shape)
    for row in range(len(batch)):
        count = int(batch.batch["response_mask"][row].sum())
        response = batch.batch["responses"][row, :count]
        with torch.no_grad():
            peer.model.rope_deltas = None
            inputs = peer_of(model, row // samples)
            prompt = peer(**inputs, use_cache=True)
            ids = torch.cat([inputs["input_ids"], response[None]], dim=1)
            kinds = torch.nn.functional.pad(inputs["mm_token_type_ids"], (0, count))
            grids = ("image_grid_thw", "video_grid_thw", "second_per_grid_ts")
            named = {name: inputs[name] for name in grids if name in inputs}
            positions, _ = peer.model.get_rope_index(ids, mm_token_type_ids=kinds, **named)
            rest = peer(
                input_ids=response[None],
                past_key_values=prompt.past_key_values,
                position_ids=positions[..., -count:],
            )
        logits = torch.cat([prompt.logits[0, -1:], rest.logits[0, :-1]]).float()
        found[row, :count] = logits.log_softmax(-1).gather(1, response[:, None])[:, 0]
    return found


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_prompts(tmp_path_factory.mktemp("prompts"))


@pytest.fixture(params=FAMILIES)
def any_vision_model(request: pytest.FixtureRequest, vision_models: dict[str, Path]) -> Path:
    """One of all families: those of `vision_model`, and those with experts."""
    return vision_models[request.param]


def test_log_probs_are_those_of_transformers_and_of_the_sampler(any_vision_model: Path, file: Path) -> None:
    """Images of mixed sizes, several in a row, text among them, in micro-batches of any order."""
    engine = make_engine(any_vision_model, model={"use_fused_kernels": "qwen3" in any_vision_model.name})
    batch = sampled(engine, any_vision_model, file)
    assert batch.batch["position_ids"].shape[1] == 4
    mask = batch.batch["response_mask"].bool()
    expected = peer_log_probs(any_vision_model, batch)[mask]
    for micro in (MICRO, MicroBatching(max_tokens=150)):
        found = engine.infer(batch, micro, outputs=("log_probs",))["log_probs"][mask]
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(batch.batch["rollout_log_probs"][mask], expected, atol=1e-5, rtol=1e-5)
    digests = batch.non_tensor_batch["image_digest"].reshape(len(PROMPTS), SAMPLES)
    assert [len(set(row)) for row in digests] == [1] * len(PROMPTS) and len(set(digests[:, 0])) == len(PROMPTS)


def test_log_probs_of_videos_are_those_of_transformers_and_of_the_sampler(vision_model: Path, tmp_path: Path) -> None:
    """Rows with videos, with a video and an image, with images alone and with text alone, in any micro-batches."""
    engine = make_engine(vision_model)
    batch = sampled(engine, vision_model, write_video_prompts(tmp_path), samples=2)
    mask = batch.batch["response_mask"].bool()
    expected = peer_log_probs(vision_model, batch, 2, peer_video_inputs)[mask]
    for micro in (MICRO, MicroBatching(max_tokens=150)):
        found = engine.infer(batch, micro, outputs=("log_probs",))["log_probs"][mask]
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(batch.batch["rollout_log_probs"][mask], expected, atol=1e-5, rtol=1e-5)
    assert len(set(batch.non_tensor_batch["image_digest"][::2])) == len(VIDEO_PROMPTS)


#: what a package of a further model does, by which transformers knows its classes
OWN_CLASSES = """
from transformers import AutoConfig, AutoModel, AutoModelForImageTextToText, Qwen3VLConfig
from transformers import Qwen3VLForConditionalGeneration, Qwen3VLModel


class MyConfig(Qwen3VLConfig):
    model_type = "my_vl"


class MyModel(Qwen3VLModel):
    config_class = MyConfig


class MyForConditionalGeneration(Qwen3VLForConditionalGeneration):
    config_class = MyConfig


AutoConfig.register("my_vl", MyConfig)
AutoModel.register(MyConfig, MyModel)
AutoModelForImageTextToText.register(MyConfig, MyForConditionalGeneration)
"""


def test_a_family_of_the_users_own(
    vision_models: dict[str, Path], file: Path, tmp_path: Path, repository: Path
) -> None:
    """The example of docs/vision.md: a model type that the library does not know computes as the same model does."""
    page = (repository / "docs" / "vision.md").read_text(encoding="utf-8")
    (source,) = re.findall(r"```python file\n# my_vision\.py\n(.*?)```", page, re.DOTALL)
    (tmp_path / "my_vision.py").write_text(source + OWN_CLASSES)
    known = vision_models["qwen3_vl"]
    own = Path(shutil.copytree(known, tmp_path / "qwen3_vl"))
    settings = json.loads((own / "config.json").read_text())
    settings |= {"model_type": "my_vl", "architectures": ["MyForConditionalGeneration"]}
    (own / "config.json").write_text(json.dumps(settings))
    import_external_lib(str(tmp_path / "my_vision.py"))
    expected = sampled(make_engine(known), known, file)
    batch = sampled(make_engine(own), own, file)
    for name in ("responses", "position_ids", "rollout_log_probs"):
        assert batch.batch[name].equal(expected.batch[name])
    assert list(batch.non_tensor_batch["image_digest"]) == list(expected.non_tensor_batch["image_digest"])
    with raises_with(ModelError, "my_vl"):
        register_vision_family("my_vl", FAMILIES["qwen2_5_vl"])


def test_prompts_that_differ_in_their_image_are_not_taken_for_one(vision_model: Path, file: Path) -> None:
    engine = make_engine(vision_model)
    batch = sampled(engine, vision_model, file, samples=1)
    ids = batch.batch["prompts"]
    assert ids[0].equal(ids[1])
    first = batch.batch["rollout_log_probs"][:2, 0]
    same = batch.batch["responses"][0, 0] == batch.batch["responses"][1, 0]
    assert not same or abs(float(first[0] - first[1])) > 1e-6


def test_a_prompt_whose_images_did_not_arrive_is_not_answered(vision_model: Path, file: Path) -> None:
    engine, prompts = make_engine(vision_model), prompts_of(file, vision_model)
    prompts.non_tensor_batch["sample"] = object_array([0] * len(PROMPTS))
    del prompts.non_tensor_batch["multi_modal_inputs"]
    rollout = HFRollout(RolloutConfig(response_length=2), engine, [2], 0)
    with pytest.raises(RolloutError, match=r"prompt 0 of the batch has 4 image placeholders, and its images have 0"):
        rollout.generate(prompts)


def test_a_sampled_placeholder_is_no_image(vision_model: Path, file: Path) -> None:
    """A policy may sample the placeholder's id; training reads it as generation did, as a plain token."""
    engine = make_engine(vision_model)
    batch = sampled(engine, vision_model, file, samples=1)
    token = engine.config.image_token_id
    batch.batch["responses"][:, 0] = batch.batch["input_ids"][:, -RESPONSE] = token
    batch.batch["attention_mask"][:, -RESPONSE:] = batch.batch["response_mask"][:] = 1
    found = engine.infer(batch, MICRO, outputs=("log_probs",))["log_probs"]
    torch.testing.assert_close(found, peer_log_probs(vision_model, batch, 1), atol=1e-5, rtol=1e-5)
    batch.batch["response_mask"][:, 0] = 0  # as where rejection leaves this token out of an update
    again = engine.infer(batch, MICRO, outputs=("log_probs",))["log_probs"]
    torch.testing.assert_close(again[:, 1:], found[:, 1:], atol=1e-5, rtol=1e-5)


def test_images_in_another_order_are_refused(vision_model: Path, file: Path) -> None:
    engine = make_engine(vision_model)
    batch = sampled(engine, vision_model, file, samples=1)
    images = batch.non_tensor_batch["multi_modal_inputs"]
    swapped = images.copy()
    swapped[[0, 1]] = images[[1, 0]]  # of the same size: placeholders fit
    within = images.copy()
    halves = images[4]["pixel_values"].chunk(2)
    within[4] = {**images[4], "pixel_values": torch.cat([halves[1], halves[0]])}
    for wrong, row in ((swapped, 0), (within, 4)):
        planted = DataProto(batch.batch, {**batch.non_tensor_batch, "multi_modal_inputs": wrong}, batch.meta_info)
        for call in (
            lambda given: engine.infer(given, MICRO),
            lambda given: engine.train_batch(given, MICRO, policy_loss),
        ):
            with raises_with(ValueError, f"sequence {row}"):
                call(planted)
    engine.infer(batch, MICRO)


def test_placeholders_are_counted_in_each_row(vision_model: Path, file: Path) -> None:
    engine = make_engine(vision_model)
    batch = sampled(engine, vision_model, file, samples=1)
    del batch.non_tensor_batch["image_digest"]
    images = batch.non_tensor_batch["multi_modal_inputs"]
    for row, wrong in ((0, images[3]), (0, {}), (2, images[0])):
        given = images.copy()
        given[row] = wrong
        planted = DataProto(batch.batch, {"multi_modal_inputs": given}, batch.meta_info)
        with pytest.raises(ValueError, match=rf"sequence {row}: it has \d+ image placeholders, and its \d images have"):
            engine.infer(planted, MICRO)
    truncated = batch.batch.clone()
    truncated["attention_mask"][4, : truncated["prompts"].shape[1] - 12] = 0
    with pytest.raises(ValueError, match=r"sequence 4: .*truncated"):
        engine.infer(DataProto(truncated, {"multi_modal_inputs": images}, batch.meta_info), MICRO)


@pytest.mark.parametrize("frozen", [False, True])
def test_an_update_trains_the_vision_tower_unless_it_is_frozen(vision_model: Path, file: Path, frozen: bool) -> None:
    engine = make_engine(vision_model, freeze_vision_tower=frozen)
    batch = sampled(engine, vision_model, file)
    before = weights(engine)
    for _ in range(2):  # the first step of a warm-up has no learning rate
        engine.train_batch(batch, MICRO, policy_loss)
    changed = {name for name, tensor in weights(engine).items() if not tensor.equal(before[name])}
    seen = {name for name in changed if "visual" in name}
    assert bool(seen) is not frozen
    assert changed - seen == {name for name in before if "visual" not in name}
    if frozen:
        kinds = {name for name in engine.model_state.trainable if "visual" in name}
        assert not kinds


def test_exported_weights_and_checkpoints_are_transformers(any_vision_model: Path, file: Path, tmp_path: Path) -> None:
    """Names and values are those of the files; a saved model is loaded by transformers, with its image processor."""
    engine = make_engine(any_vision_model)
    with safe_open(any_vision_model / "model.safetensors", "pt") as stored:
        expected = {name: stored.get_tensor(name) for name in stored.keys()}
    exported = weights(engine)
    assert exported.keys() == expected.keys()
    assert all(tensor.equal(expected[name]) for name, tensor in exported.items())
    batch = sampled(engine, any_vision_model, file)
    for _ in range(2):
        engine.train_batch(batch, MICRO, policy_loss)
    engine.save(tmp_path, ["model", "optimizer", "extra", "hf_model"])
    kept = shutil.copytree(tmp_path / "hf_model", tmp_path / any_vision_model.name)  # the family is in the name
    AutoImageProcessor.from_pretrained(kept, backend="pil")
    mask = batch.batch["response_mask"].bool()
    found = engine.infer(batch, MICRO)["log_probs"]
    torch.testing.assert_close(peer_log_probs(kept, batch)[mask], found[mask], atol=1e-5, rtol=1e-5)
    other = make_engine(any_vision_model)
    other.load(tmp_path, ["model", "optimizer", "extra"])
    for one in (engine, other):
        one.train_batch(batch, MICRO, policy_loss)
    ours, theirs = weights(engine), weights(other)
    assert all(tensor.equal(theirs[name]) for name, tensor in ours.items())


@pytest.mark.parametrize(
    ("model", "engine", "said"),
    [
        ({"share_prefixes": True}, {}, "model.share_prefixes=True is not built for vision-language models"),
        ({}, {"ulysses_sequence_parallel_size": 2}, "ulysses_sequence_parallel_size=2 is not built for vision"),
        ({}, {"use_torch_compile": True}, "use_torch_compile=True is not built for vision"),
    ],
)
def test_settings_that_do_not_fit_are_refused(vision_model: Path, model: dict, engine: dict, said: str) -> None:
    with pytest.raises(ModelError, match=said):
        make_engine(vision_model, model=model, **engine)


def test_a_text_model_has_no_tower_to_freeze(micro_model: Path) -> None:
    with raises_with(ModelError, "freeze_vision_tower=True", "(qwen2)"):
        make_engine(micro_model, freeze_vision_tower=True)


#: of an optimizer whose step is linear in the gradient. Adam's first steps divide by its size: a gradient that is zero
#: but for rounding moves a weight as far as any other, and in two ranks by another sum.
LINEAR = {"optimizer": "SGD", "lr": 0.5}


def two_ranks(rank: int, file: Path, models: list[Path], expected: Path) -> None:
    """Rank 1 has rows of text and fewer micro-batches; gradients and weights are those of one process."""
    for model in models:
        wanted = load_file(expected / f"{model.name}.safetensors")
        engine = make_engine(model, optim=LINEAR)
        whole = sampled(engine, model, file)
        rows = [[0, 1, 2, 3, 4, 5, 9, 10, 11, 12, 13, 14], [6, 7, 8]][rank]
        batch = whole.select_idxs(torch.tensor(rows))
        batch.meta_info = dict(whole.meta_info)
        metrics = [engine.train_batch(batch, MICRO, policy_loss) for _ in range(2)]
        norm, found = float(metrics[1]["grad_norm"].value), weights(engine)
        assert norm == pytest.approx(float(wanted.pop("grad_norm")), rel=1e-4)
        assert found.keys() == wanted.keys()
        for name, tensor in found.items():
            torch.testing.assert_close(
                tensor, wanted[name], atol=1e-5, rtol=1e-4, msg=lambda text, n=name: f"{n}: {text}"
            )
        again = sampled(engine, model, file).select_idxs(torch.tensor(rows))
        mask = again.batch["response_mask"].bool()
        log_probs = engine.infer(again, MICRO)["log_probs"]
        torch.testing.assert_close(log_probs[mask], again.batch["rollout_log_probs"][mask], atol=1e-5, rtol=1e-5)


@pytest.mark.slow
def test_two_ranks_are_one(vision_models: dict[str, Path], file: Path, tmp_path: Path) -> None:
    for model in vision_models.values():
        engine = make_engine(model, optim=LINEAR)
        batch = sampled(engine, model, file)
        metrics = [engine.train_batch(batch, MICRO, policy_loss) for _ in range(2)]
        norm = torch.tensor(float(metrics[1]["grad_norm"].value))
        save_file({**weights(engine), "grad_norm": norm}, tmp_path / f"{model.name}.safetensors")
    spawn(two_ranks, 2, file, list(vision_models.values()), tmp_path)


def test_the_image_of_ranks_without_any_changes_nothing(vision_model: Path, file: Path) -> None:
    """It has one token, which no row reads, and its gradient is zero."""
    from hybridrl.engine.batch_images import with_some_image

    engine = make_engine(vision_model)
    batch = sampled(engine, vision_model, file, samples=1)
    plan = engine.plan_batch(batch, MicroBatching(size=1))
    layout = plan.layout([2])
    assert layout.images is None
    other = with_some_image(layout, engine.config)
    np.testing.assert_equal(other.images.tensors["pixel_values"].numpy(), smallest_image(engine.config)["pixel_values"])
    logits = [engine.forward_pass.logits(one) for one in (layout, other)]
    assert logits[0].equal(logits[1])
    logits[1].sum().backward()
    tower = [p.grad for name, p in engine.module.named_parameters() if "visual" in name]
    assert all(grad is not None and not grad.any() for grad in tower)


@pytest.mark.parametrize("four", [False, True], ids=["lora", "qlora"])
def test_an_adapter_sees_images_too(vision_model: Path, file: Path, tmp_path: Path, four: bool) -> None:
    """Merged, in the sampler, and switched off; in the vision tower (never in 4 bits) unless that is frozen."""
    settings = {"lora_rank": 4, "load_in_4bit": four}
    engine = make_engine(vision_model, model=settings)
    base = make_engine(rounded_copy(vision_model, tmp_path / "rounded") if four else vision_model)
    batch = sampled(engine, vision_model, file, samples=1)

    def log_probs(one, of: DataProto = batch) -> torch.Tensor:  # type: ignore[no-untyped-def]
        return one.infer(of, MICRO, outputs=("log_probs",))["log_probs"]

    for _ in range(3):
        engine.train_batch(batch, MICRO, policy_loss)
    ours = log_probs(engine)
    with engine.without_adapter():
        assert torch.equal(log_probs(engine), log_probs(base))
    assert float((ours - log_probs(base)).abs().max()) > 1e-2
    again = sampled(engine, vision_model, file, samples=1)
    mask = again.batch["response_mask"].bool()
    torch.testing.assert_close(
        log_probs(engine, again)[mask], again.batch["rollout_log_probs"][mask], atol=1e-5, rtol=1e-5
    )
    engine.save(tmp_path, ["hf_model"])
    torch.testing.assert_close(log_probs(make_engine(tmp_path / "hf_model")), ours, atol=1e-5, rtol=1e-5)
    frozen = make_engine(vision_model, model=settings, freeze_vision_tower=True)
    assert any(".visual." in name for name in engine.model_state.trainable)
    assert frozen.model_state.trainable and not any(".visual." in name for name in frozen.model_state.trainable)
