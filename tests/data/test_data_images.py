"""Images of a data set's rows: their forms, their count against placeholders, their tokens and positions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image
from raising import raises_with
from vision_tools import PROMPTS, dataset_of, peer_inputs, picture, pictures, png, prompts_of, write_prompts

from hybridrl.config import ModelConfig
from hybridrl.data.preprocess.preprocessing import write_rows
from hybridrl.errors import DataError, ModelError
from hybridrl.models.model_config import load_model_config
from hybridrl.models.pictures import as_rgb
from hybridrl.models.vision import ImageProcessor, digest, processor_of
from hybridrl.protocol import DataProto, bookkeeping
from hybridrl.verl_compat.utils.dataset.rl_dataset import RLHFDataset


def saved(folder: Path, *rows: tuple[Any, Any]) -> Path:
    write_rows(folder / "rows.parquet", [{"prompt": prompt, "images": images} for prompt, images in rows])
    return folder / "rows.parquet"


def user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def test_prompts_are_what_transformers_makes_of_them(vision_model: Path, tmp_path: Path) -> None:
    """Token ids, patches and rotary positions of every row, from a data set and in a padded batch."""
    file = write_prompts(tmp_path)
    dataset, batch = dataset_of(file, vision_model), prompts_of(file, vision_model)
    config = load_model_config(vision_model)
    for row in range(len(PROMPTS)):
        item, peer = dataset[row], peer_inputs(vision_model, row)
        assert item["input_ids"] == peer["input_ids"][0].tolist()
        assert "images" not in item and item["raw_prompt"][0]["content"] == PROMPTS[row][0]
        inputs = item["multi_modal_inputs"]
        assert sorted(inputs) == (["image_grid_thw", "pixel_values"] if PROMPTS[row][1] else [])
        for name, tensor in inputs.items():
            torch.testing.assert_close(tensor, peer[name])
        mask = batch.batch["attention_mask"][row].bool()
        assert batch.batch["input_ids"][row][mask].tolist() == item["input_ids"]
        assert batch.batch["position_ids"][row][:, mask].equal(item["position_ids"])
        assert not batch.batch["position_ids"][row][:, ~mask].any()
        assert item["position_ids"][0].tolist() == list(range(len(item["input_ids"])))
        images = item["position_ids"][1:, torch.tensor(item["input_ids"]) == config.image_token_id]
        assert len(images.unique(dim=1).T) == images.shape[1]  # each token of an image has a place of its own
    text = dataset[2]["position_ids"]
    assert text.equal(torch.arange(text.shape[1]).expand(4, -1))


def test_every_form_of_an_image_gives_the_same_patches(vision_model: Path, tmp_path: Path) -> None:
    image = picture((30, 20), 3)
    (tmp_path / "a.png").write_bytes(png(image))
    path = str(tmp_path / "a.png")
    forms = [[{"bytes": png(image)}], [{"bytes": None, "path": path}], [{"bytes": None, "path": f"file://{path}"}]]
    dataset = dataset_of(saved(tmp_path, *((user("<image>?"), form) for form in forms)), vision_model)
    found = {digest(dataset[row]["multi_modal_inputs"]) for row in range(len(forms))}
    parts = [{"type": "image", "image": path, "text": None}, {"type": "text", "text": "?", "image": None}]
    inline = dataset_of(saved(tmp_path, ([{"role": "user", "content": parts}], None)), vision_model)
    found.add(digest(inline[0]["multi_modal_inputs"]))
    assert inline[0]["raw_prompt"][0]["content"] == [{"type": "image"}, {"type": "text", "text": "?"}]
    assert inline[0]["input_ids"] == dataset[0]["input_ids"]

    class InMemory(RLHFDataset):
        def _read_files_and_tokenize(self) -> None:
            self.dataframe = [{"prompt": "<image>?", "images": [one]} for one in (image, image.convert("RGBA"))]

    given = InMemory([], dataset.tokenizer, {}, processor=dataset.processor)
    found |= {digest(given[row]["multi_modal_inputs"]) for row in range(2)}
    assert len(found) == 1 and found != {""}
    grey = dataset_of(saved(tmp_path, (user("<image>?"), [{"bytes": png(Image.new("L", (16, 16)))}])), vision_model)
    assert grey[0]["multi_modal_inputs"]["pixel_values"].shape[0] == 16


@pytest.mark.parametrize(
    ("text", "images", "said"),
    [
        ("<image> and <image>", 1, r"row 1 .*has 2 <image>.*'images'.*has 1 images"),
        ("nothing", 1, r"row 1 .*has 0 <image>.*has 1 images"),
        ("<image>", 0, r"row 1 .*has 1 <image>.*has 0 images"),
        ("<image><|image_pad|>", 1, r"row 1 .*2 image placeholders .* for 1 images.*image token of its own"),
        ("<video>", 0, r"row 1 .*has 1 <video> and column 'videos' .* has 0 videos"),
        ("<image>" * 7, 7, r"row 1 .*the prompt has \d+ tokens, more than data.max_prompt_length=120.*max_pixels"),
    ],
)
def test_a_row_that_does_not_fit_is_refused_by_its_number(vision_model, tmp_path, text, images, said) -> None:
    good = (user("<image>"), [{"bytes": png(picture((16, 16), 0))}])
    bad = (user(text), [{"bytes": png(picture((40, 40), n))} for n in range(images)])
    for truncation in ("error", "left"):
        with pytest.raises(DataError, match=said):
            dataset_of(saved(tmp_path, good, bad), vision_model, max_prompt_length=120, truncation=truncation)


@pytest.mark.parametrize(
    ("image", "said"),
    [
        ({"bytes": b"no image"}, r"row 0 .*image 0: it cannot be opened: UnidentifiedImageError"),
        ({"path": "missing.png"}, r"row 0 .*image 0: it cannot be opened: FileNotFoundError"),
        ({"path": "https://example.org/a.png"}, r"row 0 .*download the image"),
        ({"path": None, "bytes": None}, r"row 0 .*image 0: it is missing"),
        ({"bytes": png(Image.new("RGB", (2000, 4)))}, r"row 0 .*aspect ratio"),
    ],
)
def test_an_image_that_cannot_be_read_is_named(vision_model, tmp_path, image, said) -> None:
    with pytest.raises(DataError, match=said):
        dataset_of(saved(tmp_path, (user("<image>"), [image])), vision_model)


def test_a_cut_off_image_is_named_when_it_is_decoded(vision_model: Path, tmp_path: Path) -> None:
    whole = png(picture((48, 48), 1))
    dataset = dataset_of(saved(tmp_path, (user("<image>"), [{"bytes": whole[: len(whole) // 2]}])), vision_model)
    with pytest.raises(DataError, match=r"row 0 .*cannot be decoded"):
        dataset[0]


def test_long_prompts_of_images_are_left_out_and_text_is_truncated(vision_model: Path, tmp_path: Path) -> None:
    large = [{"bytes": png(picture((64, 64), 0))}]
    file = saved(tmp_path, (user("<image>"), large), (user("x" * 90), None), (user("short"), None))
    kept = dataset_of(file, vision_model, max_prompt_length=50, filter_overlong_prompts=True)
    assert kept.indices == [2]
    smaller = dataset_of(
        file, vision_model, max_prompt_length=50, truncation="left", mm_processor_kwargs={"max_pixels": 256}
    )
    lengths = [len(smaller[row]["input_ids"]) for row in range(3)]
    assert lengths[1] == 50 and lengths[0] < 50
    assert smaller[1]["position_ids"].shape == (4, 50)
    assert smaller[0]["multi_modal_inputs"]["image_grid_thw"].tolist() == [[1, 4, 4]]


def test_media_that_the_model_does_not_read_are_refused(vision_model: Path, micro_model: Path, tmp_path: Path) -> None:
    from hybridrl.models.tokenizer import load_tokenizer

    file = write_prompts(tmp_path)
    with raises_with(DataError, "'images'", "which models"):
        RLHFDataset(str(file), load_tokenizer(micro_model), {})
    write_rows(tmp_path / "v.parquet", [{"prompt": "x", "audios": ["a.wav"]}])
    with raises_with(DataError, "'audios'"):
        dataset_of(tmp_path / "v.parquet", vision_model)
    with pytest.raises(DataError, match="processor: it is a str"):
        RLHFDataset(str(file), load_tokenizer(micro_model), {}, processor="x")  # type: ignore[arg-type]


def test_options_of_the_image_processor(vision_model: Path) -> None:
    config, image = load_model_config(vision_model), picture((64, 48), 0)
    usual = ImageProcessor(vision_model, config)
    less = ImageProcessor(vision_model, config, {"max_pixels": 1024, "min_pixels": 64})
    for processor in (usual, less):
        patches = processor.pixels([image])["pixel_values"]
        assert processor.placeholders(image) == len(patches) // 4
        assert processor.positions([1, 2], None).tolist() == [[0, 1]] * 4
    assert less.placeholders(image) < usual.placeholders(image) == 48
    plain = ImageProcessor(vision_model, config, {"image_mean": [0.0] * 3, "image_std": [1.0] * 3})
    assert float(plain.pixels([image])["pixel_values"].min()) >= 0
    with raises_with(ModelError, "data.mm_processor_kwargs", "max_pixels"):
        ImageProcessor(vision_model, config, {"maxpixels": 1})
    with raises_with(ModelError, "max_pixels"):
        ImageProcessor(vision_model, config, {"max_pixels": 1024, "size": {"shortest_edge": 64, "longest_edge": 4096}})
    config.vision_config.patch_size = 14
    with raises_with(ModelError, "patch_size=4", 14, "different models"):
        ImageProcessor(vision_model, config)


def test_a_digest_tells_images_and_their_order_apart(vision_model: Path) -> None:
    processor = ImageProcessor(vision_model, load_model_config(vision_model))
    first, second = pictures()[4]
    ways = [[first, second], [second, first], [first], [first, first]]
    assert len({digest(processor.pixels(images)) for images in ways}) == 4
    assert digest(processor.pixels(ways[0])) == digest(processor.pixels([first.copy(), second]))
    assert digest({}) == ""


def test_options_for_a_model_that_reads_text_are_refused(micro_model: Path) -> None:
    model = ModelConfig(path=str(micro_model))
    assert processor_of(model) is None
    with raises_with(ModelError, "data.mm_processor_kwargs="):
        processor_of(model, {"max_pixels": 1024})


@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    names=st.sets(st.sampled_from(sorted(bookkeeping.bookkeeping())), max_size=20),
    value=st.sampled_from([7, "a", True, [1.5]]),
)
def test_columns_of_internal_names_change_no_batch_with_images(names, value, vision_model, tmp_path) -> None:
    rows = [
        {"prompt": user(text), "images": [{"bytes": png(image)} for image in images]}
        for (text, _), images in zip(PROMPTS, pictures(), strict=True)
    ]

    def batch(further: dict[str, Any]) -> DataProto:
        write_rows(tmp_path / "rows.parquet", [{**row, **further} for row in rows])
        return prompts_of(tmp_path / "rows.parquet", vision_model)

    plain, named = batch({}), batch(dict.fromkeys(names, value))
    assert plain.batch.keys() == named.batch.keys()
    assert all(torch.equal(plain.batch[name], named.batch[name]) for name in plain.batch.keys())
    for name, values in plain.non_tensor_batch.items():
        if name == "multi_modal_inputs":
            pairs = zip(values, named.non_tensor_batch[name], strict=True)
            assert all(digest(one) == digest(other) for one, other in pairs)
        elif name != "uid":  # drawn
            assert list(values) == list(named.non_tensor_batch[name]), name
    assert len(set(named.non_tensor_batch["uid"])) == len(rows)


@pytest.mark.parametrize("name", ["path", "bytes", "url", "image"])
def test_the_image_of_a_part_is_its_own_by_any_name(name: str, vision_model: Path, tmp_path: Path) -> None:
    """Also where the column has another one, which would be shown in its place."""
    own, other = (png(picture((30, 20), seed)) for seed in (1, 2))
    (tmp_path / "own.png").write_bytes(own)
    part = {"type": "image", name: own if name == "bytes" else str(tmp_path / "own.png")}
    next_one = [{"role": "user", "content": [{"type": "image"}]}]
    rows = ([{"role": "user", "content": [part]}], None), (next_one, [{"bytes": own}])
    dataset = dataset_of(saved(tmp_path, *rows), vision_model)
    assert digest(dataset[0]["multi_modal_inputs"]) == digest(dataset[1]["multi_modal_inputs"])
    assert dataset[0]["input_ids"] == dataset[1]["input_ids"]
    with pytest.raises(DataError, match=r"has 0 <image>.*has 1 images"):
        dataset_of(saved(tmp_path, ([{"role": "user", "content": [part]}], [{"bytes": other}])), vision_model)
    for wrong in ("image_url", "base64"):
        parts = [{"type": "image", wrong: "x"}]
        with pytest.raises(DataError, match=rf"row 0 .*{wrong!r}, which is not read"):
            dataset_of(saved(tmp_path, ([{"role": "user", "content": parts}], [{"bytes": other}])), vision_model)


def test_grey_images_of_16_bits_are_as_bright_as_those_of_8(vision_model: Path, tmp_path: Path) -> None:
    shades = np.arange(16 * 16, dtype=np.uint16).reshape(16, 16)
    grey = [png(Image.fromarray(shades.astype(np.uint8))), png(Image.fromarray(shades * 257))]
    dataset = dataset_of(saved(tmp_path, *((user("<image>"), [{"bytes": image}]) for image in grey)), vision_model)
    assert digest(dataset[0]["multi_modal_inputs"]) == digest(dataset[1]["multi_modal_inputs"])
    # Integers of 32 bits hold values of 8 bits, or of 16.
    for values in (shades.astype(np.int32), shades.astype(np.int32) * 257):
        assert np.array_equal(np.asarray(as_rgb(Image.fromarray(values)))[..., 0], shades)
    wide = np.full((16, 16), 2**20, dtype=np.int32)
    for image in (Image.fromarray(wide), Image.fromarray(wide.astype(np.float32))):
        with pytest.raises(ValueError, match="its values are"):
            as_rgb(image)
