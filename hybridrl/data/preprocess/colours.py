"""The colour task: images of a tile in one of four colours, which a tiny vision-language model learns to name.

    python -m hybridrl.data.preprocess.colours --out DIR [--videos] [--seed 0]

A prompt is `<image>Colour?`, its image is between 16 and 48 pixels wide and high, and its answer is the first letter of
the colour. The text is the same in every row, so only the image tells which answer is right. The reward (data source
`hybridrl/colours`) is 1 for the right letter as the first one of the response, and 0.1 for that of another colour.

With `--videos` a prompt is `<video>Last colour?`. Its video has four frames at two per second, in which the tile moves
and changes its colour once, in the middle. The colour that it has at the end is asked for.
"""

from __future__ import annotations

import argparse
import io
import random
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hybridrl.data.preprocess.preprocessing import write_rows
from hybridrl.errors import UserError

if TYPE_CHECKING:
    from PIL.Image import Image

DATA_SOURCE = "hybridrl/colours"
COLOURS = {"red": (220, 40, 40), "green": (40, 190, 60), "blue": (50, 70, 230), "yellow": (230, 220, 50)}
BACKGROUND = (128, 128, 128)
SIDES = (16, 24, 32, 40, 48)
FRAMES, FPS = 4, 2.0  # of a video


def draw_tile(colour: str, size: tuple[int, int], rng: random.Random) -> Image:
    """Draw a tile on a grey background of this width and height, at random, in a shade of the colour."""
    from PIL import Image, ImageDraw

    width, height = size
    image = Image.new("RGB", (width, height), BACKGROUND)
    x0, y0 = rng.randrange(width // 4 + 1), rng.randrange(height // 4 + 1)
    x1, y1 = rng.randrange(3 * width // 4, width), rng.randrange(3 * height // 4, height)
    red, green, blue = (min(max(part + rng.randrange(-25, 26), 0), 255) for part in COLOURS[colour])
    ImageDraw.Draw(image).rectangle((x0, y0, x1, y1), fill=(red, green, blue))
    return image


def png(image: Image) -> dict[str, bytes]:
    """The image as data sets of the hub have it."""
    file = io.BytesIO()
    image.save(file, "PNG")
    return {"bytes": file.getvalue()}


def make_row(split: str, index: int, rng: random.Random, videos: bool = False) -> dict[str, Any]:
    """Build one row, in the schema that every preprocessing script writes, with its image or video as PNG."""
    colour, size = rng.choice(sorted(COLOURS)), (rng.choice(SIDES), rng.choice(SIDES))
    if videos:
        before = rng.choice(sorted(COLOURS.keys() - {colour}))
        frames = [
            png(draw_tile(tile_colour, size, rng))
            for tile_colour in [before] * (FRAMES // 2) + [colour] * (FRAMES // 2)
        ]
        media: dict[str, Any] = {"videos": [{"frames": frames, "fps": FPS}]}
    else:
        media = {"images": [png(draw_tile(colour, size, rng))]}
    return {
        "data_source": DATA_SOURCE,
        "prompt": [{"role": "user", "content": "<video>Last colour?" if videos else "<image>Colour?"}],
        **media,
        "ability": "vision",
        "reward_model": {"style": "rule", "ground_truth": colour[0]},
        "extra_info": {"split": split, "index": index, "colour": colour},
    }


def write_colours(
    out: str | Path, *, videos: bool = False, seed: int = 0, train_size: int = 2048, test_size: int = 128
) -> Path:
    """Write `train.parquet` and `test.parquet` into `out` (created if missing). The same arguments give the same rows.

    Raises:
        UserError: Pillow is not installed.
    """
    try:
        import PIL  # noqa: F401  (only to say so at once)
    except ImportError as error:
        raise UserError("drawing images needs the package pillow: pip install pillow") from error
    folder = Path(out)
    folder.mkdir(parents=True, exist_ok=True)
    for split, size in (("train", train_size), ("test", test_size)):
        rng = random.Random(f"{seed} {split}")
        write_rows(folder / f"{split}.parquet", [make_row(split, index, rng, videos) for index in range(size)])
    return folder


def main(argv: list[str] | None = None) -> None:
    """Run the command line of this module."""
    parser = argparse.ArgumentParser(
        prog="python -m hybridrl.data.preprocess.colours", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--out", required=True, help="folder to write the parquet files into")
    parser.add_argument("--videos", action="store_true", help="videos in place of images")
    parser.add_argument("--seed", type=int, default=0, help="seed of the images (0)")
    parser.add_argument("--train-size", type=int, default=2048, help="number of training prompts (2048)")
    parser.add_argument("--test-size", type=int, default=128, help="number of validation prompts (128)")
    arguments = parser.parse_args(argv)
    try:
        folder = write_colours(**vars(arguments))
    except UserError as error:
        parser.error(str(error))
    print(f"{arguments.train_size} training and {arguments.test_size} validation prompts written to {folder}")


if __name__ == "__main__":
    main()
