"""What a plain transformers model answers to a judge's questions, as the dumps of a run have them."""

import json
import re
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

TEMPLATE = "{{ prompt }} -> {{ response }} ({{ ground_truth }})"
#: about every third answer cannot be read
PARSE = """
def parse(text, sample):
    letters = sum(map(ord, text))
    return None if letters % 3 == 0 else {"score": letters % 100, "truth": sample["ground_truth"]}
"""


def answer_of(model: Path, question: str, system: str | None, max_tokens: int) -> str:
    """The greedy answer to a question."""
    tokenizer, weights = AutoTokenizer.from_pretrained(model), AutoModelForCausalLM.from_pretrained(model)
    messages = [{"role": "system", "content": system}] if system else []
    ids = tokenizer.apply_chat_template(
        [*messages, {"role": "user", "content": question}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=False,
    )
    with torch.no_grad():
        found = weights.generate(ids, do_sample=False, max_new_tokens=max_tokens, attention_mask=torch.ones_like(ids))
    return str(tokenizer.decode(found[0, ids.shape[1] :], skip_special_tokens=True))


def check_judgements(
    file: Path, model: Path, system: str | None = "Be fair.", max_tokens: int = 8
) -> list[dict[str, Any]]:
    """Compare the judgements of a dump with the model's, and return its rows."""
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert rows
    for row in rows:
        asked = re.fullmatch(r"user\n(.*)\nassistant\n", row["input"], re.DOTALL)
        assert asked is not None
        text = answer_of(model, f"{asked[1]} -> {row['output']} ({row['gts']})", system, max_tokens)
        assert row["judge/judgement"] == text
        assert row["judge"] == sum(map(ord, text)) % 100 and row["judge/truth"] == row["gts"]
    return rows
