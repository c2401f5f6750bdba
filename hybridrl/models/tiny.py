"""Builds a tiny Qwen2 and a character tokenizer locally, for laptops, tests and machines without a hub.

    python -m hybridrl.models.tiny --out DIR [--hidden 128] [--layers 2] [--seed 0] ...

The weights are random. The tokenizer has one token for every byte (so every ASCII character is a token, and any text
survives a round trip), one for each chat role and one for `####`, which marks answers.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from hybridrl.errors import UserError
from hybridrl.utils.files import use_umask

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PAD_TOKEN = "<|pad|>"
START_TOKEN = "<|im_start|>"
END_TOKEN = "<|im_end|>"
WHOLE_WORDS = ("system", "user", "assistant", "tool", "####")
MAX_POSITIONS = 4096

#: messages as ChatML; tools and calls of them as in `multi_turn.format=hermes`
CHAT_TEMPLATE = (
    "{% if tools %}{{ '<|im_start|>system\\nTools:\\n' }}"
    "{% for tool in tools %}{{ (tool['function'] | tojson) + '\\n' }}{% endfor %}"
    """{{ '<tool_call>{"name": NAME, "arguments": {...}}</tool_call> calls one.<|im_end|>\\n' }}{% endif %}"""
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + (message['content'] or '') }}"
    "{% for call in message['tool_calls'] or [] %}{{ '<tool_call>' + "
    "({'name': call['function']['name'], 'arguments': call['function']['arguments']} | tojson) + '</tool_call>' }}"
    "{% endfor %}{{ '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def build_tokenizer(words: Sequence[str] = ()) -> PreTrainedTokenizerBase:
    """Build the character tokenizer: 264 tokens and `words`, with a chat template.

    It is a byte-level BPE without merges, in the class that `AutoTokenizer` picks for a qwen2 directory. transformers 5
    rebuilds any other tokenizer saved next to a Qwen2 as a `Qwen2Tokenizer`, which then silently drops spaces and
    newlines.
    """
    from tokenizers import AddedToken
    from tokenizers.pre_tokenizers import ByteLevel
    from transformers import Qwen2Tokenizer

    tokens = [PAD_TOKEN, START_TOKEN, END_TOKEN, *WHOLE_WORDS, *sorted(ByteLevel.alphabet()), *dict.fromkeys(words)]
    tokenizer = Qwen2Tokenizer(
        vocab={token: number for number, token in enumerate(tokens)},
        merges=[],
        unk_token=None,
        pad_token=PAD_TOKEN,
        eos_token=END_TOKEN,
        extra_special_tokens=[START_TOKEN],
        model_max_length=MAX_POSITIONS,
    )
    tokenizer.add_tokens([AddedToken(word, normalized=False) for word in (*WHOLE_WORDS, *words)])
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def build_tiny_model(
    out: str | Path,
    *,
    hidden: int = 128,
    layers: int = 2,
    intermediate: int | None = None,
    heads: int = 4,
    kv_heads: int = 2,
    seed: int = 0,
    words: Sequence[str] = (),
) -> Path:
    """Write a randomly initialised Qwen2 (fp32 safetensors) and its character tokenizer into `out`.

    The default is 2 layers, hidden 128, intermediate 256, 4 heads and 2 KV heads of size 32 (which vLLM also runs):
    0.36 M parameters. The same arguments give the same weights, bit for bit.

    Args:
        out: folder to write into; created if missing.
        hidden: model width; `heads` must divide it.
        layers: number of transformer layers.
        intermediate: width of the MLP; `2 * hidden` if None.
        heads: attention heads; `kv_heads` must divide it.
        kv_heads: key/value heads.
        seed: seed of the initial weights.
        words: text that is one token each, further than those that the tokenizer has anyway.

    Raises:
        UserError: the sizes do not fit together.
    """
    if hidden % heads or heads % kv_heads or (hidden // heads) % 2:
        raise UserError(
            f"hidden={hidden}, heads={heads}, kv_heads={kv_heads} do not fit together: heads must divide hidden into "
            "an even head size, and kv_heads must divide heads. Change --hidden, --heads or --kv-heads."
        )
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    tokenizer = build_tokenizer(words)
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        intermediate_size=2 * hidden if intermediate is None else intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=MAX_POSITIONS,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        tie_word_embeddings=False,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen2ForCausalLM(config).to(torch.float32)
    folder = Path(out)
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    for file in folder.glob("*.safetensors"):
        use_umask(file)
    tokenizer.save_pretrained(folder)
    return folder


def _words_in(file: str) -> list[str]:
    """The list of texts in a JSON file."""
    try:
        words = json.loads(Path(file).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise argparse.ArgumentTypeError(f"{file}: {error}") from error
    if not isinstance(words, list) or not words or not all(isinstance(word, str) and word for word in words):
        raise argparse.ArgumentTypeError(f"{file}: it must hold a list of texts that are not empty")
    return words


def main(argv: list[str] | None = None) -> None:
    """Run the command line of this module."""
    parser = argparse.ArgumentParser(prog="python -m hybridrl.models.tiny", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", required=True, help="folder to write the model and its tokenizer into")
    parser.add_argument("--hidden", type=int, default=128, help="model width (128)")
    parser.add_argument("--layers", type=int, default=2, help="number of layers (2)")
    parser.add_argument("--intermediate", type=int, default=None, help="width of the MLP (twice --hidden)")
    parser.add_argument("--heads", type=int, default=4, help="attention heads (4)")
    parser.add_argument("--kv-heads", type=int, default=2, help="key/value heads (2)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the random weights (0)")
    parser.add_argument(
        "--words", type=_words_in, default=(), help="JSON file with a list of further text that is one token each"
    )
    arguments = parser.parse_args(argv)
    try:
        folder = build_tiny_model(**vars(arguments))
    except UserError as error:
        parser.error(str(error))
    print(f"tiny model and tokenizer written to {folder}")


if __name__ == "__main__":
    main()
