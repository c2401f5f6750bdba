"""Answers of the rollout to prompts, with the prompts' columns.

Shapes: B rows, T response width.
"""

from collections.abc import Iterable
from typing import Any

import numpy as np

from hybridrl.errors import RolloutError
from hybridrl.protocol import DataProto
from hybridrl.protocol.names import (
    ATTEMPT,
    DATA_COLUMNS,
    MISSING_SAMPLES,
    MULTI_MODAL_INPUTS,
    PROMPT_IMAGES,
    TRAJECTORY_REWARD,
)
from hybridrl.protocol.sample_names import SampleName, sample_names
from hybridrl.rollout import Rollout
from hybridrl.rollout.rollout import OnFinished
from hybridrl.trainer.ppo.batching import trim


def attempt_meta(attempt: int) -> dict[str, Any]:
    """Return the setting of a call that repeats samples; the first attempt has none."""
    return {ATTEMPT: attempt} if attempt else {}


def respond(
    rollout: Rollout, prompts: DataProto, temperature: float, on_finished: OnFinished | None = None, **meta: Any
) -> DataProto:
    """Have a rollout answer prompts. The answer also has the columns of the prompts.

    A rollout that returns no `uid` answers row by row. A rollout that returns `uid` may return any number of rows per
    prompt, in any order; each row gets the columns of its prompt. A column that the rollout returns is kept as it is.

    Args:
        prompts: rows with all of their columns (`raw_prompt`, `extra_info`, ...); the rollout gets all of them.
        temperature: the temperature that responses are trained at.
        on_finished: see `Rollout.generate`.
        meta: settings of this call: `global_steps`, `validate`, and fields of `SamplingParams` to override.

    Raises:
        RolloutError: a prompt has no answer, or an answer has no prompt.
    """
    request = DataProto(batch=prompts.batch, non_tensor_batch=dict(prompts.non_tensor_batch), meta_info=meta)
    answer = trim(rollout.generate(request) if on_finished is None else rollout.generate(request, on_finished))
    columns = _columns_of(prompts, answer)
    if MULTI_MODAL_INPUTS in answer.non_tensor_batch and MULTI_MODAL_INPUTS in columns:
        columns[PROMPT_IMAGES] = columns[MULTI_MODAL_INPUTS]
    of_data = [name for name in columns if name not in answer.non_tensor_batch]
    brought = {DATA_COLUMNS: of_data} if TRAJECTORY_REWARD in answer.non_tensor_batch else {}
    answer.non_tensor_batch = columns | answer.non_tensor_batch
    missing = {name: answer.meta_info[name] for name in (MISSING_SAMPLES,) if name in answer.meta_info}
    answer.meta_info = {"temperature": temperature, **missing, **brought, **attempt_meta(meta.get(ATTEMPT, 0))}
    return answer


def _columns_of(prompts: DataProto, answer: DataProto) -> dict[str, np.ndarray]:
    """Return the prompts' columns for the rows of the answer, found by `uid` and `sample`, or by row without `uid`."""
    columns, returned = prompts.non_tensor_batch, answer.non_tensor_batch
    if "uid" not in returned:
        if len(answer) != len(prompts):
            raise RolloutError(
                f"the rollout returned {len(answer)} rows for {len(prompts)}, and no column 'uid' to tell which prompt "
                "each row answers; a rollout that returns another number of rows must return 'uid' and 'sample'"
            )
        return dict(columns)
    numbered = "sample" in returned and "sample" in columns

    def keys(names: Iterable[SampleName]) -> list[tuple[Any, ...]]:
        return [name if numbered else name[:1] for name in names]

    requested, answered = keys(sample_names(prompts)), keys(sample_names(answer))
    row_of = {key: row for row, key in reversed(list(enumerate(requested)))}
    dropped = keys(sample.name for sample in answer.meta_info.get(MISSING_SAMPLES, ()) if not sample.again)
    strange, unanswered = set(answered) - set(requested), set(requested) - set(answered) - set(dropped)
    if strange or unanswered:
        problem = "answered rows that were not asked for" if strange else "left rows without an answer"
        raise RolloutError(
            f"the rollout {problem}: {'uid, sample' if numbered else 'uid'} = "
            f"{[tuple(map(str, key)) for key in sorted(strange or unanswered)[:3]]} "
            f"({len(strange or unanswered)} in all, of {len(set(requested))})"
        )
    rows = np.array([row_of[key] for key in answered], dtype=np.int64)
    # If the rollout does not say which sample a row belongs to, every row counts as its own sample.
    return {name: column[rows] for name, column in columns.items() if name != "sample" or "sample" in returned}
