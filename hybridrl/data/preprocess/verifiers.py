"""Rows of an environment of verifiers, for the agent loop `verifiers_agent`.

    python -m hybridrl.data.preprocess.verifiers --loops LOOPS.yaml --out DIR [--name NAME] [--limit N] [--test-size N]

`LOOPS.yaml` is the file of `actor_rollout_ref.rollout.agent.agent_loop_config_path`. Each task becomes a row: its
prompt, the name of the loop, and the whole task as JSON in the column `verifiers_task`. The last `--test-size` tasks go
to `test.parquet`, the others to `train.parquet`.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hybridrl.agents.agents import listed_loops
from hybridrl.agents.environments.verifiers import TASK, VerifiersServer
from hybridrl.agents.loops.verifiers_agent import VerifiersAgentLoop
from hybridrl.data.preprocess.preprocessing import write_rows
from hybridrl.errors import UserError


def rl_row(task: Mapping[str, Any], name: str, split: str, index: int) -> dict[str, Any]:
    """The row of a task.

    Args:
        task: a dumped `TaskData` of verifiers.
        name: of the loop.
        split: `train` or `test`.
        index: of the task.
    """
    task_prompt = task.get("prompt")
    messages = (
        task_prompt
        if isinstance(task_prompt, list)
        else [{"role": "user", "content": task_prompt or task.get("name") or ""}]
    )
    prompt = [{"role": message["role"], "content": _text(message.get("content"))} for message in messages]
    if task.get("system_prompt"):
        prompt.insert(0, {"role": "system", "content": task["system_prompt"]})
    return {
        "data_source": f"verifiers/{name}",
        "prompt": prompt,
        "ability": "verifiers",
        "reward_model": {"style": "rule", "ground_truth": ""},
        "agent_name": name,
        TASK: json.dumps(task, ensure_ascii=False),
        "extra_info": {"split": split, "index": index},
    }


def _text(content: Any) -> str:
    return content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)


def write_verifiers(loops: str, out: Path, name: str | None, limit: int | None, test_size: int) -> None:
    """Write the files.

    Raises:
        UserError: the file has no such loop, or the environment has too few tasks.
    """
    entries = {key: entry for key, entry in listed_loops(loops).items() if issubclass(entry.cls, VerifiersAgentLoop)}
    if name is None and len(entries) == 1:
        name = next(iter(entries))
    if name is None or name not in entries:
        raise UserError(
            f"--name {name}: {loops} has {', '.join(entries) or 'no loop of verifiers'}; choose one of them"
        )
    server = VerifiersServer.of(entries[name].arguments, serves=False)
    try:
        server.start()
        tasks = server.tasks(limit)
    finally:
        server.close()
    if not 0 <= test_size < len(tasks):
        raise UserError(f"--test-size {test_size}: the environment has {len(tasks)} tasks; ask for fewer")
    cut = len(tasks) - test_size
    out.mkdir(parents=True, exist_ok=True)
    rows = [rl_row(task, name, "train" if n < cut else "test", n) for n, task in enumerate(tasks)]
    write_rows(out / "train.parquet", rows[:cut])
    if test_size:
        write_rows(out / "test.parquet", rows[cut:])


def main(argv: list[str] | None = None) -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(
        prog="python -m hybridrl.data.preprocess.verifiers", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--loops", required=True, help="the file of agent_loop_config_path")
    parser.add_argument("--out", required=True, type=Path, help="folder to write the parquet files into")
    parser.add_argument("--name", help="the loop, where the file has several of verifiers")
    parser.add_argument("--limit", type=int, help="number of tasks; all by default; an endless taskset needs it")
    parser.add_argument("--test-size", type=int, default=0, help="number of validation tasks (0)")
    arguments = parser.parse_args(argv)
    try:
        write_verifiers(arguments.loops, arguments.out, arguments.name, arguments.limit, arguments.test_size)
    except UserError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
