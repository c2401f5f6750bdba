"""Pictures of every kind are read as transformers' own loader reads them, from files and for the model."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from PIL import Image, PngImagePlugin
from transformers.image_utils import load_image
from vision_tools import dataset_of, peer_processor, picture

from hybridrl.data.preprocess.preprocessing import write_rows
from hybridrl.data.row_images import file_of, open_image
from hybridrl.data.row_videos import open_video
from hybridrl.models.pictures import as_rgb, upright_size


def saved(image: Image.Image, kind: str, **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def with_orientation(value: int) -> Image.Exif:
    exif = Image.Exif()
    exif[0x0112] = value
    return exif


def late_exif(value: int) -> bytes:
    """A PNG file with its tags behind the pixels."""
    plain = saved(picture((24, 40), 1), "PNG")
    tagged = saved(picture((24, 40), 1), "PNG", exif=with_orientation(value))
    at = tagged.index(b"eXIf") - 4
    chunk = tagged[at : at + 12 + int.from_bytes(tagged[at : at + 4], "big")]
    end = plain.index(b"IEND") - 4
    return plain[:end] + chunk + plain[end:]


def transparent_palette() -> Image.Image:
    image = picture((24, 40), 2).quantize(16)
    image.info["transparency"] = 3
    return image


def moving() -> bytes:
    frames = [picture((24, 40), seed) for seed in range(3)]
    return saved(frames[0], "GIF", save_all=True, append_images=frames[1:], duration=50)


RGBA = Image.merge("RGBA", [*picture((24, 40), 3).split(), picture((24, 40), 4).convert("L")])
CASES: dict[str, bytes] = {
    **{f"jpeg {n}": saved(picture((24, 40), n), "JPEG", exif=with_orientation(n)) for n in range(1, 9)},
    **{f"png {n}": saved(picture((24, 40), n), "PNG", exif=with_orientation(n)) for n in range(1, 9)},
    **{f"webp {n}": saved(picture((24, 40), n), "WEBP", exif=with_orientation(n)) for n in (3, 6)},
    **{f"tiff {n}": saved(picture((24, 40), n), "TIFF", tiffinfo={274: n}) for n in range(1, 9)},
    **{f"late png {n}": late_exif(n) for n in (3, 5, 8)},
    "jpeg 9": saved(picture((24, 40), 1), "JPEG", exif=with_orientation(9)),
    "rgba": saved(RGBA, "PNG"),
    "rgba sideways": saved(RGBA, "PNG", exif=with_orientation(6)),
    "grey and alpha": saved(RGBA.convert("LA"), "PNG"),
    "grey": saved(RGBA.convert("L"), "JPEG", exif=with_orientation(8)),
    "palette": saved(picture((24, 40), 2).quantize(16), "PNG"),
    "palette with transparency": saved(transparent_palette(), "PNG", transparency=3),
    "palette with alphas": saved(transparent_palette(), "PNG", transparency=bytes(range(0, 256, 16))),
    "cmyk": saved(picture((24, 40), 5).convert("CMYK"), "JPEG", exif=with_orientation(6)),
    "ycbcr": saved(picture((24, 40), 5).convert("YCbCr"), "JPEG"),
    "bilevel": saved(picture((24, 40), 5).convert("1"), "PNG"),
    "gif": moving(),
    "gif with transparency": saved(transparent_palette(), "GIF", transparency=3),
    "bmp": saved(picture((24, 40), 5), "BMP"),
}


def peer(data: bytes) -> Image.Image:
    return load_image(Image.open(io.BytesIO(data)))


@pytest.mark.parametrize("name", CASES)
def test_a_file_is_read_as_transformers_reads_it(name: str) -> None:
    expected = peer(CASES[name])
    image = open_image({"bytes": CASES[name]}, "row 0")
    assert upright_size(image) == expected.size
    read = as_rgb(image)
    assert read.mode == "RGB"
    assert np.array_equal(np.asarray(read), np.asarray(expected))
    assert upright_size(image) == expected.size  # after it is decoded, too


@settings(max_examples=30, deadline=None)
@given(
    value=st.integers(0, 12), width=st.integers(1, 40), height=st.integers(1, 40), kind=st.sampled_from(["PNG", "WEBP"])
)
def test_any_size_and_tag(value: int, width: int, height: int, kind: str) -> None:
    data = saved(picture((width, height), value), kind, exif=with_orientation(value))
    image = open_image(data, "row 0")
    assert upright_size(image) == peer(data).size
    assert np.array_equal(np.asarray(as_rgb(image)), np.asarray(peer(data)))


def test_damaged_tags_leave_the_picture_as_it_is() -> None:
    text = PngImagePlugin.PngInfo()
    text.add_text("Raw profile type exif", "no hexadecimal digits")
    data = saved(picture((24, 40), 1), "PNG", pnginfo=text)
    image = open_image(data, "row 0")
    assert upright_size(image) == (24, 40)
    assert np.array_equal(np.asarray(as_rgb(image)), np.asarray(picture((24, 40), 1)))


def test_agents_are_shown_the_same_picture() -> None:
    for name in ("jpeg 6", "tiff 6", "bmp", "cmyk"):
        kind, data = file_of(open_image(CASES[name], "row 0"))
        assert kind.startswith("image/")
        assert np.array_equal(np.asarray(peer(data)), np.asarray(peer(CASES[name])))


@pytest.mark.parametrize("name", ["jpeg 6", "png 5", "late png 8", "rgba sideways", "cmyk", "gif"])
def test_prompts_have_the_tokens_and_patches_of_the_upright_picture(
    vision_model: Path, tmp_path: Path, name: str
) -> None:
    prompt = [{"role": "user", "content": "<image>What is it?"}]
    write_rows(tmp_path / "rows.parquet", [{"prompt": prompt, "images": [{"bytes": CASES[name]}]}])
    item = dataset_of(tmp_path / "rows.parquet", vision_model)[0]
    inputs = peer_processor(vision_model).image_processor(images=[peer(CASES[name])], return_tensors="pt")
    assert torch.equal(item["multi_modal_inputs"]["image_grid_thw"], inputs["image_grid_thw"])
    torch.testing.assert_close(item["multi_modal_inputs"]["pixel_values"], inputs["pixel_values"])


def test_frames_of_a_video_are_upright() -> None:
    video = open_video({"frames": [{"bytes": CASES["jpeg 6"]}, {"bytes": CASES["jpeg 8"]}], "fps": 2.0}, "row 0")
    assert video.size == (40, 24)
    for frame, name in zip(video.frames([0, 1]), ("jpeg 6", "jpeg 8"), strict=True):
        assert np.array_equal(np.asarray(frame), np.asarray(peer(CASES[name])))
