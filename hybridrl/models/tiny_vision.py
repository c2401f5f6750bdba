"""Builds a tiny vision-language model and its tokenizer and image processor locally.

    python -m hybridrl.models.tiny_vision --out DIR [--family qwen2_5_vl] [--hidden 64] [--layers 2] [--seed 0]

The weights are random. An image of 16 x 16 pixels becomes four tokens: a token covers 8 x 8 pixels. The tokenizer is
that of `hybridrl.models.tiny`, with the tokens that stand for images.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hybridrl.errors import UserError
from hybridrl.models.loading import without_progress_bar
from hybridrl.models.tiny import MAX_POSITIONS, build_tokenizer
from hybridrl.models.vision_families import FAMILIES
from hybridrl.utils.files import use_umask

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PATCH, MERGE = 4, 2
SMALLEST = (PATCH * MERGE) ** 2  # pixels of an image
LARGEST = 64  # tokens of an image
VISION_TOKENS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' }}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}"
    "{% if part['type'] in ['image', 'video'] %}{{ '<|vision_start|><|' + part['type'] + '_pad|><|vision_end|>' }}"
    "{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}"
    "{% for call in message['tool_calls'] or [] %}"
    "{{ '<tool_call>' + {'name': call['function']['name'], 'arguments': call['function']['arguments']} | tojson }}"
    "{{ '</tool_call>' }}{% endfor %}"
    "{{ '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def build_vision_tokenizer() -> PreTrainedTokenizerBase:
    """Build the character tokenizer with the tokens of images, and a chat template that writes them."""
    tokenizer = build_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": list(VISION_TOKENS)}, replace_extra_special_tokens=False)
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def build_tiny_vision_model(
    out: str | Path,
    *,
    family: str = "qwen2_5_vl",
    hidden: int = 64,
    layers: int = 2,
    heads: int = 4,
    kv_heads: int = 2,
    vision_hidden: int = 32,
    vision_layers: int = 2,
    patch: int = PATCH,
    smallest: int = SMALLEST,
    seed: int = 0,
) -> Path:
    """Write a randomly initialised model (fp32 safetensors), its tokenizer and its image processor into `out`.

    The same arguments give the same weights, bit for bit.

    Args:
        out: folder to write into; created if missing.
        family: one of `FAMILIES`.
        hidden: width of the language layers; `heads` must divide it into heads of a multiple of 8.
        layers: number of language layers.
        heads: attention heads of these; `kv_heads` must divide it.
        kv_heads: their key/value heads.
        vision_hidden: width of the vision tower, which has two heads.
        vision_layers: its number of layers.
        patch: pixels per side of a patch; a token covers four patches. SGLang reads Qwen2.5-VL with 14 alone.
        smallest: pixels that a smaller image is enlarged to.
        seed: seed of the initial weights.

    Raises:
        UserError: the family is unknown, or the sizes do not fit together.
    """
    if family not in FAMILIES:
        raise UserError(f"family={family!r}: allowed are {', '.join(FAMILIES)}")
    if hidden % (8 * heads) or heads % kv_heads or vision_hidden % 16:
        raise UserError(
            f"hidden={hidden}, heads={heads}, kv_heads={kv_heads}, vision_hidden={vision_hidden} do not fit together: "
            "heads must divide hidden into heads of a multiple of 8, kv_heads must divide heads, and 16 vision_hidden"
        )
    import torch
    from transformers import AutoConfig, AutoModelForImageTextToText

    tokenizer = build_vision_tokenizer()
    config = AutoConfig.for_model(
        family,
        text_config=_text(family, tokenizer, hidden, layers, heads, kv_heads),
        vision_config=_vision(family, vision_hidden, vision_layers, hidden, patch),
        tie_word_embeddings=False,
        **{
            f"{name}_token_id": tokenizer.convert_tokens_to_ids(token)
            for name, token in zip(("vision_start", "vision_end", "image", "video"), VISION_TOKENS, strict=True)
        },
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForImageTextToText.from_config(config).to(torch.float32)
    folder = Path(out)
    folder.mkdir(parents=True, exist_ok=True)
    with without_progress_bar():
        model.save_pretrained(folder)
    for file in folder.glob("*.safetensors"):
        use_umask(file)
    tokenizer.save_pretrained(folder)
    _image_processor(patch, smallest).save_pretrained(folder)
    _write_video_processor(folder, family, patch, smallest)
    return folder


def _text(
    family: str, tokenizer: PreTrainedTokenizerBase, hidden: int, layers: int, heads: int, kv_heads: int
) -> dict[str, Any]:
    size = hidden // heads
    pairs = size // 2 if "_vl" in family else size // 4  # that rotate
    return {
        "vocab_size": len(tokenizer),
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": size,
        "max_position_embeddings": MAX_POSITIONS,
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        # a quarter of each head's rotations for time, three eighths for height and for width
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10_000.0,
            "partial_rotary_factor": 2 * pairs / size,
            "mrope_section": [pairs // 4, 3 * pairs // 8, pairs - pairs // 4 - 3 * pairs // 8],
            # as in the files of released models; vLLM reads it, transformers knows it by the model's type
            **({"mrope_interleaved": True} if FAMILIES[family].interleaves else {}),
        },
        # experts, and layers that carry a state; each family ignores what is not its own
        **{"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": hidden // 2, "decoder_sparse_step": 1},
        **{"shared_expert_intermediate_size": hidden, "norm_topk_prob": True},
        **{"linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 16},
        **{"linear_value_head_dim": 16, "linear_conv_kernel_dim": 4},
        **({} if "_vl" in family else {"layer_types": (["linear_attention", "full_attention"] * layers)[:layers]}),
    }


def _vision(family: str, hidden: int, layers: int, text_hidden: int, patch: int) -> dict[str, Any]:
    """Settings of all families; each ignores those of the other."""
    return {
        "depth": layers,
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_heads": 2,
        "in_channels": 3,
        "patch_size": patch,
        "spatial_merge_size": MERGE,
        "temporal_patch_size": 2,
        "out_hidden_size": text_hidden,
        "window_size": 4 * patch,
        "fullatt_block_indexes": [layers - 1],
        "num_position_embeddings": 64,
        **({"deepstack_visual_indexes": [0]} if "_vl" in family else {}),
    }


def _image_processor(patch: int, smallest: int) -> Any:
    from transformers import Qwen2VLImageProcessorPil

    return Qwen2VLImageProcessorPil(
        patch_size=patch,
        merge_size=MERGE,
        temporal_patch_size=2,
        size={"shortest_edge": smallest, "longest_edge": LARGEST * (patch * MERGE) ** 2},
    )


def _write_video_processor(folder: Path, family: str, patch: int, smallest: int) -> None:
    """The settings alone: transformers' video processors need torchvision."""
    settings = json.loads((folder / "preprocessor_config.json").read_text())
    settings |= {
        "video_processor_type": "Qwen3VLVideoProcessor" if FAMILIES[family].writes_times else "Qwen2VLVideoProcessor",
        "do_sample_frames": FAMILIES[family].writes_times,
        # Qwen3's count the pixels of all frames together
        "size": {"shortest_edge": smallest, "longest_edge": LARGEST * (patch * MERGE) ** 2},
    }
    del settings["image_processor_type"]
    (folder / "video_preprocessor_config.json").write_text(json.dumps(settings, indent=2) + "\n")


def main(argv: list[str] | None = None) -> None:
    """Run the command line of this module."""
    parser = argparse.ArgumentParser(
        prog="python -m hybridrl.models.tiny_vision", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--out", required=True, help="folder to write the model and its tokenizer into")
    parser.add_argument("--family", default="qwen2_5_vl", choices=FAMILIES, help="kind of model (qwen2_5_vl)")
    parser.add_argument("--hidden", type=int, default=64, help="width of the language layers (64)")
    parser.add_argument("--layers", type=int, default=2, help="number of language layers (2)")
    parser.add_argument("--heads", type=int, default=4, help="attention heads (4)")
    parser.add_argument("--kv-heads", type=int, default=2, help="key/value heads (2)")
    parser.add_argument("--vision-hidden", type=int, default=32, help="width of the vision tower (32)")
    parser.add_argument("--vision-layers", type=int, default=2, help="layers of the vision tower (2)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the random weights (0)")
    arguments = parser.parse_args(argv)
    try:
        folder = build_tiny_vision_model(**vars(arguments))
    except UserError as error:
        parser.error(str(error))
    print(f"tiny vision-language model written to {folder}")


if __name__ == "__main__":
    main()
