"""The calculator task: sums that a tiny model gets right once it has learned to call a calculator.

    python -m hybridrl.data.preprocess.calculator --out DIR [--operations 2] [--calls 0.3] [--seed 0]

A prompt is `37*58+12` and its answer is `#### 2158`. The reward (data source `hybridrl/calculator`) is 1 for an exact
match. A tiny model cannot multiply, but it can learn to copy: numbers into calls of the calculator, one call for each
operation, and the calculator's last answer into its own.

The script writes `train.parquet` and `test.parquet` for reinforcement learning (disjoint prompts), `tools.yaml` for
`multi_turn.tool_config_path`, `words.json` for `python -m hybridrl.models.tiny --words`, and `sft_train.parquet` and
`sft_val.parquet` for the supervised warm start: conversations as `messages`, of which the share `--calls` solve the
prompt with the calculator and the others give up (`#### ?`).
"""

from __future__ import annotations

import argparse
import json
import random
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hybridrl.data.preprocess.preprocessing import write_rows
from hybridrl.errors import UserError

DATA_SOURCE = "hybridrl/calculator"
LEAST, MOST = 10, 99  # of the numbers in a prompt
OPERATORS = "*+"  # the first operation is always *, further ones are +, so that they are computed in order
UNKNOWN = "?"  # the answer of a conversation that gives up
TOOLS = "tools.yaml"
WORDS = "words.json"
#: text of the chat template of `hybridrl.models.tiny`, and of a call
_TEMPLATE = ("Tools:\n", '{"name": NAME, "arguments": {...}}', " calls one.")
_CALL = ("<tool_call>", "</tool_call>", '{"name": "', '", "arguments": {"', '": "', '"}}')

Problem = tuple[int, ...]


def make_problems(count: int, operations: int, seed: int) -> list[Problem]:
    """Draw different problems of `operations` operations each.

    Raises:
        UserError: there are fewer than that many different ones.
    """
    available = (MOST - LEAST + 1) ** (operations + 1)
    if count > available:
        raise UserError(
            f"--train-size and --test-size ask for {count} different prompts, but there are only {available} of "
            f"{operations} operations. Ask for fewer, or raise --operations."
        )
    draw = random.Random(f"{seed} {operations}")
    problems: dict[Problem, None] = {}
    while len(problems) < count:
        problems[tuple(draw.randint(LEAST, MOST) for _ in range(operations + 1))] = None
    return list(problems)


def question(problem: Problem) -> str:
    """The expression: its first two numbers are multiplied, the others added."""
    first, *others = problem
    return str(first) + "".join(f"{OPERATORS[min(place, 1)]}{number}" for place, number in enumerate(others))


def calls(problem: Problem) -> list[tuple[str, str]]:
    """(expression, its value) of the calls that solve a problem, one for each operation."""
    value, *others = problem
    steps = []
    for place, number in enumerate(others):
        expression = f"{value}{OPERATORS[min(place, 1)]}{number}"
        value = value + number if place else value * number
        steps.append((expression, str(value)))
    return steps


def answer(problem: Problem) -> str:
    """Return the ground truth."""
    return calls(problem)[-1][1]


def rl_row(problem: Problem, split: str, index: int) -> dict[str, Any]:
    """Build one row of the RL files, in the schema that every preprocessing script writes."""
    return {
        "data_source": DATA_SOURCE,
        "prompt": [{"role": "user", "content": question(problem)}],
        "ability": "calculator",
        "reward_model": {"style": "rule", "ground_truth": answer(problem)},
        "extra_info": {"split": split, "index": index},
    }


def sft_row(problem: Problem, uses_calculator: bool, tools: Sequence[Any]) -> dict[str, Any]:
    """Build one row of the supervised files: a conversation that solves the prompt by calls, or gives up."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": question(problem)}]
    for expression, value in calls(problem) if uses_calculator else ():
        call = {"type": "function", "function": {"name": "calculator", "arguments": {"expression": expression}}}
        messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
        messages.append({"role": "tool", "content": value})
    messages.append({"role": "assistant", "content": f"#### {answer(problem) if uses_calculator else UNKNOWN}"})
    return {"messages": messages, "tools": list(tools)}


def words_of(tools: Sequence[Mapping[str, Any]]) -> list[str]:
    """Text that the tokenizer of a tiny model has as one token each: what is the same in every prompt or call."""
    described = "".join(json.dumps(tool["function"]) for tool in tools)
    return list(dict.fromkeys([*_TEMPLATE, *_CALL, *filter(None, re.split("(calculator|expression)", described))]))


def write_calculator(
    out: str | Path,
    *,
    seed: int = 0,
    train_size: int = 8000,
    test_size: int = 128,
    operations: int = 2,
    calls: float = 0.3,
) -> Path:
    """Write the six files into `out` (created if missing). The same arguments give the same rows.

    Raises:
        UserError: fewer different prompts exist than requested, or `calls` is no share.
    """
    from hybridrl.agents.tools.builtin import Calculator

    if not 0 <= calls <= 1 or operations < 1:
        raise UserError(f"--calls {calls} must be between 0 and 1, and --operations {operations} at least 1.")
    problems = make_problems(train_size + test_size, operations, seed)
    train, test = problems[:train_size], problems[train_size:]
    tools = [Calculator({}).tool_schema]
    draw = random.Random(seed)
    folder = Path(out)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / TOOLS).write_text("tools:\n  - class_name: calculator\n", encoding="utf-8")
    (folder / WORDS).write_text(json.dumps(words_of(tools), indent=1) + "\n", encoding="utf-8")
    for name, rows in (("train", train), ("test", test)):
        write_rows(folder / f"{name}.parquet", (rl_row(row, name, index) for index, row in enumerate(rows)))
    for name, rows in (("sft_train", train), ("sft_val", test)):
        write_rows(folder / f"{name}.parquet", (sft_row(row, draw.random() < calls, tools) for row in rows))
    return folder


def main(argv: list[str] | None = None) -> None:
    """Run the command line of this module."""
    parser = argparse.ArgumentParser(
        prog="python -m hybridrl.data.preprocess.calculator", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--out", required=True, help="folder to write the files into")
    parser.add_argument("--seed", type=int, default=0, help="seed of the prompts (0)")
    parser.add_argument("--train-size", type=int, default=8000, help="number of training prompts (8000)")
    parser.add_argument("--test-size", type=int, default=128, help="number of validation prompts (128)")
    parser.add_argument("--operations", type=int, default=2, help="operations of a prompt (2)")
    parser.add_argument("--calls", type=float, default=0.3, help="share of the examples that call the calculator (0.3)")
    arguments = parser.parse_args(argv)
    try:
        folder = write_calculator(**vars(arguments))
    except UserError as error:
        parser.error(str(error))
    print(f"{arguments.train_size} training and {arguments.test_size} validation prompts written to {folder}")


if __name__ == "__main__":
    main()
