"""Videos of a data set's rows: their forms, the frames that are read, their tokens and positions."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from raising import raises_with
from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor
from transformers.video_utils import VideoMetadata
from vision_tools import (
    VIDEO_PROMPTS,
    dataset_of,
    movies,
    peer_video_inputs,
    picture,
    png,
    prompts_of,
    write_video_prompts,
)

from hybridrl.config import ModelConfig, load_config
from hybridrl.data import create_sft_dataset
from hybridrl.data.preprocess.preprocessing import write_rows
from hybridrl.errors import DataError, ModelError
from hybridrl.models.model_config import load_model_config
from hybridrl.models.tokenizer import load_tokenizer
from hybridrl.models.vision import digest, processor_of
from hybridrl.verl_compat.utils.dataset.rl_dataset import RLHFDataset


def frames_of(count: int, size: tuple[int, int] = (24, 16)) -> np.ndarray:
    return np.stack([np.asarray(picture(size, number)) for number in range(count)])


def given_rows(model: Path, videos: list[Any], text: str = "<video>?", **config: Any) -> RLHFDataset:
    """A data set of a class of one's own, whose rows hold arrays and tensors."""

    class InMemory(RLHFDataset):
        def _read_files_and_tokenize(self) -> None:
            self.dataframe = [{"prompt": text, "videos": [one]} for one in videos]

    processor = processor_of(ModelConfig(path=str(model)), config.pop("mm_processor_kwargs", None))
    return InMemory([], load_tokenizer(model), {"max_prompt_length": 200, **config}, processor=processor)


def test_prompts_are_what_transformers_makes_of_them(vision_model: Path, tmp_path: Path) -> None:
    """Token ids, patches and rotary positions of every row, from a data set and in a padded batch."""
    file = write_video_prompts(tmp_path)
    dataset, batch = dataset_of(file, vision_model), prompts_of(file, vision_model)
    processor = processor_of(ModelConfig(path=str(vision_model)))
    assert processor is not None
    rope: Any = processor._positions._model
    names = ("mm_token_type_ids", "image_grid_thw", "video_grid_thw", "second_per_grid_ts")
    for row, (text, _, _) in enumerate(VIDEO_PROMPTS):
        item, peer = dataset[row], peer_video_inputs(vision_model, row)
        assert item["input_ids"] == peer["input_ids"][0].tolist()
        assert not {"images", "videos"} & item.keys() and item["raw_prompt"][0]["content"] == text
        patches = [peer[name] for name in ("pixel_values", "pixel_values_videos") if name in peer]
        if patches:  # in no row does a video come before an image
            torch.testing.assert_close(item["multi_modal_inputs"]["pixel_values"], torch.cat(patches))
        else:
            assert item["multi_modal_inputs"] == {}
        positions, _ = rope.get_rope_index(peer["input_ids"], **{name: peer[name] for name in names if name in peer})
        assert item["position_ids"][1:].equal(positions[:, 0])
        mask = batch.batch["attention_mask"][row].bool()
        assert batch.batch["input_ids"][row][mask].tolist() == item["input_ids"]
        assert batch.batch["position_ids"][row][:, mask].equal(item["position_ids"])


def test_a_still_video_is_an_image(vision_model: Path) -> None:
    """Patches of two equal frames are those that the image processor makes of one, at the video's size."""
    processor = processor_of(
        ModelConfig(path=str(vision_model)), {"min_pixels": 64, "videos_kwargs": {"min_pixels": 64}}
    )
    assert processor is not None
    frame = picture((30, 21), 5)  # resized to 32 x 24
    rows = given_rows(vision_model, [{"frames": [frame, frame], "fps": 1.0}])
    found = rows[0]["multi_modal_inputs"]
    assert found["image_grid_thw"].tolist() == [[1, 6, 8]]
    torch.testing.assert_close(found["pixel_values"], processor.pixels([frame])["pixel_values"], atol=1e-6, rtol=0)


def test_every_form_of_a_video_gives_the_same_patches(vision_model: Path, tmp_path: Path) -> None:
    frames = frames_of(4)
    images = [picture((24, 16), number) for number in range(4)]
    forms = [
        {"frames": images, "fps": 2.0},
        {"frames": frames, "fps": 2},
        {"frames": torch.from_numpy(frames), "fps": 2.0},
        {"frames": frames.transpose(0, 3, 1, 2), "fps": 2.0},
        {"path": None, "bytes": None, "frames": [{"bytes": png(one)} for one in images], "fps": 2.0},
    ]
    dataset = given_rows(vision_model, forms)
    found = {digest(dataset[row]["multi_modal_inputs"]) for row in range(len(forms))}
    parts = [{"type": "video", "video": forms[-1]}, {"type": "text", "text": "?"}]
    write_rows(tmp_path / "parts.parquet", [{"prompt": [{"role": "user", "content": parts}]}])
    inline = dataset_of(tmp_path / "parts.parquet", vision_model)
    assert inline[0]["input_ids"] == dataset[0]["input_ids"]
    assert found == {digest(inline[0]["multi_modal_inputs"])}
    other = given_rows(vision_model, [{"frames": images[::-1], "fps": 2.0}, {"frames": images, "fps": 1.0}])
    assert digest(other[0]["multi_modal_inputs"]) not in found
    # another rate changes positions of Qwen2.5-VL and text of Qwen3-VL
    assert digest(other[1]["multi_modal_inputs"]) not in found or other[1]["input_ids"] != dataset[0]["input_ids"]


def test_files_are_decoded(vision_model: Path, tmp_path: Path) -> None:
    """A lossless file has the frames that it was made of, sampled by `fps`; its rate is its own."""
    av = pytest.importorskip("av", reason="PyAV is not installed: pip install av")
    frames, content = frames_of(12), io.BytesIO()
    with av.open(content, "w", format="matroska") as container:
        stream = container.add_stream("ffv1", rate=6)
        stream.width, stream.height, stream.pix_fmt = 24, 16, "bgr0"
        for one in frames:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(one, format="rgb24").reformat(format="bgr0")))
        container.mux(stream.encode())
    path = tmp_path / "film.mkv"
    path.write_bytes(content.getvalue())
    forms = [str(path), {"path": f"file://{path}"}, {"bytes": content.getvalue()}, {"frames": frames, "fps": 6.0}]
    dataset = given_rows(vision_model, forms, mm_processor_kwargs={"fps": 2})
    assert len({tuple(dataset[row]["input_ids"]) for row in range(4)}) == 1
    assert len({digest(dataset[row]["multi_modal_inputs"]) for row in range(4)}) == 1
    assert int(dataset[0]["multi_modal_inputs"]["image_grid_thw"][:, 0].sum()) == 2  # two seconds at 2, in pairs
    path.write_bytes(content.getvalue()[:300])
    with pytest.raises(DataError, match=r", video 0: it cannot be opened"):
        given_rows(vision_model, [str(path)])


@given(
    total=st.integers(1, 400),
    fps=st.sampled_from([0.5, 1, 23.976, 24, 30]),
    options=st.sampled_from([{}, {"fps": 0.5}, {"fps": 5}, {"max_frames": 6}, {"min_frames": 12}, {"num_frames": 8}]),
)
def test_qwen3_reads_the_frames_that_transformers_chooses(
    vision_models: dict[str, Path], total: int, fps: float, options: dict[str, float]
) -> None:
    processor = processor_of(ModelConfig(path=str(vision_models["qwen3_vl"])), options)
    assert processor is not None
    wanted = options.get("num_frames")
    if wanted is not None and wanted > total:
        with raises_with(ValueError, "8 frames", total):
            processor.videos.sampled(total, fps)
        return
    peer = Qwen3VLVideoProcessor(**{"fps": None if wanted else 2, **options})
    expected = peer.sample_frames(VideoMetadata(total, fps=fps), num_frames=wanted)
    assert processor.videos.sampled(total, fps) == expected.tolist()


@pytest.mark.parametrize(
    ("total", "fps", "options", "frames"),
    [
        (5, 30, {}, [0, 1, 2, 3, 4]),  # Qwen2.5-VL reads all where nobody says how many
        (12, 6, {"fps": 3}, [0, 2, 4, 6, 8, 10]),
        (12, 6, {"fps": 3, "max_frames": 4}, [0, 3, 6, 9]),
        (12, 6, {"fps": 3, "max_frames": 5}, [0, 3, 6, 9]),
        (12, 6, {"fps": 0.1}, [0, 3, 6, 9]),  # min_frames
        (7, 6, {"num_frames": 3}, [0, 1, 3, 5]),
    ],
)
def test_qwen2_5_reads_frames_in_equal_steps(
    vision_models: dict[str, Path], total: int, fps: float, options: dict[str, float], frames: list[int]
) -> None:
    processor = processor_of(ModelConfig(path=str(vision_models["qwen2_5_vl"])), options)
    assert processor is not None and processor.videos.sampled(total, fps) == frames


def test_time_is_in_positions_or_text(vision_models: dict[str, Path]) -> None:
    """Six of twelve frames, of two seconds: three patches, two thirds of a second apart."""
    video, options = [{"frames": frames_of(12), "fps": 6.0}], {"mm_processor_kwargs": {"fps": 3}}
    clock = given_rows(vision_models["qwen2_5_vl"], video, **options)
    config = load_model_config(vision_models["qwen2_5_vl"])
    item = clock[0]
    times = item["position_ids"][1, torch.tensor(item["input_ids"]) == config.video_token_id].unique()
    steps = config.vision_config.tokens_per_second * 2 / 3 * torch.arange(3)
    assert (times - times[0]).tolist() == steps.long().tolist() == [0, 2, 5]
    text = given_rows(vision_models["qwen3_vl"], video, **options)
    shown = text.tokenizer.decode(text[0]["input_ids"])
    # frames 0, 2, 4, 7, 9, 11, in pairs
    assert [f"<{time:.1f} seconds>" in shown for time in (2 / 12, 11 / 12, 20 / 12)] == [True] * 3


def test_sizes_of_frames_have_limits_of_their_own(vision_model: Path) -> None:
    video = [{"frames": frames_of(4, (64, 64)), "fps": 2.0}]
    limit = 4 * 16 * 16 if "qwen3" in vision_model.name else 16 * 16  # Qwen3-VL counts the pixels of all frames
    small = given_rows(vision_model, video, mm_processor_kwargs={"videos_kwargs": {"max_pixels": limit}})
    grid = small[0]["multi_modal_inputs"]["image_grid_thw"]
    assert grid[:, 1:].unique(dim=0).tolist() == [[4, 4]]
    capped = given_rows(vision_model, video, mm_processor_kwargs={"cap_pixels_per_frame": True, "max_video_tokens": 8})
    assert capped[0]["multi_modal_inputs"]["image_grid_thw"][:, 1:].prod(dim=-1).max() <= 8 * 4 * 2


@pytest.mark.parametrize(
    ("videos", "text", "said"),
    [
        ([], "<video>?", r"item 0 .*: the prompt has 1 <video> and column 'videos' \(data.video_key\) has 0 videos"),
        ([{"frames": frames_of(2), "fps": 1.0}], "?", r"item 0 .*: the prompt has 0 <video> .* has 1 videos"),
        ([{"frames": frames_of(2)}], "<video>?", r", video 0: frames need their number per second"),
        ([{"frames": frames_of(2).astype(float), "fps": 1.0}], "<video>?", r"an array \[2, 16, 24, 3\] of float64"),
        ([{"frames": [], "fps": 1.0}], "<video>?", r", video 0: it is list; give a path"),
        (
            [{"frames": [picture((8, 8), 0), picture((8, 16), 0)], "fps": 1.0}],
            "<video>?",
            "frames are of different sizes",
        ),
        (["https://host/film.mp4"], "<video>?", r"is an address; download the video"),
        ([{"video": "film.mp4", "fps": 1.0}], "<video>?", r"settings of one video.*data.mm_processor_kwargs"),
        ([{"path": "film.mp4", "fps": 1.0}], "<video>?", "a file says its fps itself"),
        ([None], "<video>?", ", video 0: it is missing"),
    ],
)
def test_rows_that_cannot_be_read_are_refused(
    vision_models: dict[str, Path], videos: list[Any], text: str, said: str
) -> None:
    class InMemory(RLHFDataset):
        def _read_files_and_tokenize(self) -> None:
            self.dataframe = [{"prompt": text, "videos": videos}]

    model = vision_models["qwen2_5_vl"]
    with pytest.raises(DataError, match=said):
        InMemory([], load_tokenizer(model), {}, processor=processor_of(ModelConfig(path=str(model))))


def test_settings_without_effect_are_refused(vision_model: Path) -> None:
    for options, said in (
        ({"videos_kwargs": {"frames": 3}}, "mm_processor_kwargs.videos_kwargs: there is no frames; there are fps"),
        ({"fps": 1, "num_frames": 2}, "fps and num_frames say the same thing"),
    ):
        with pytest.raises(ModelError, match=said):
            processor_of(ModelConfig(path=str(vision_model)), options)


def test_a_model_of_text_refuses_videos(micro_model: Path, tmp_path: Path) -> None:
    file = write_video_prompts(tmp_path)
    with pytest.raises(DataError, match=r"column 'images' holds media|column 'videos' holds media"):
        RLHFDataset(str(file), load_tokenizer(micro_model), {})


def test_conversations_train_no_token_of_a_video(vision_model: Path, tmp_path: Path) -> None:
    talk = [{"role": "user", "content": "<video>What?"}, {"role": "assistant", "content": "Noise"}]
    frames = [{"bytes": png(one)} for one in movies()[0][0][0]]
    write_rows(tmp_path / "talks.parquet", [{"messages": talk, "videos": [{"frames": frames, "fps": 3.0}]}])
    config = load_config(
        "sft_trainer", [f"data.train_files={tmp_path / 'talks.parquet'}", f"model.path={vision_model}"]
    )
    tokenizer, processor = load_tokenizer(vision_model), processor_of(config.model)
    item = create_sft_dataset(str(tmp_path / "talks.parquet"), config.data, tokenizer, processor=processor)[0]
    prompt = peer_video_inputs(vision_model, 0)
    length = prompt["input_ids"].shape[1]
    assert item["input_ids"][:length] == prompt["input_ids"][0].tolist() and not any(item["loss_mask"][:length])
    assert tokenizer.decode([one for one, kept in zip(item["input_ids"], item["loss_mask"], strict=True) if kept]) == (
        "Noise<|im_end|>"
    )
    torch.testing.assert_close(item["multi_modal_inputs"]["pixel_values"], prompt["pixel_values_videos"])
    assert item["position_ids"].shape == (4, len(item["input_ids"]))
