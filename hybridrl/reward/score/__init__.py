"""Built-in scorers, chosen by a sample's `data_source`.

Each scorer is a module with `compute_score(solution_str, ground_truth, ...)`, imported when first needed. The ground
truth is text, unless the module has a `check_ground_truth(value)`, which raises `RewardError` for one that it cannot
score with; a `check_reference(text)` does that for text. A module that runs programs has a `check_machine(**sandbox)`,
and its `compute_score` takes those settings.
"""

import importlib
import math
from collections.abc import Iterable, Mapping
from types import ModuleType
from typing import Any

from hybridrl.errors import RewardError

# data source -> module of this package. A name that ends in * matches every source with that beginning.
SCORERS: dict[str, str] = {
    "openai/gsm8k": "gsm8k",
    "hybridrl/sort": "exact",
    "hybridrl/calculator": "exact",
    "lighteval/MATH": "math_reward",
    "DigitalLearningGmbH/MATH-lighteval": "math_reward",
    "HuggingFaceH4/MATH-500": "math_reward",
    "math_dapo": "math_dapo",
    "math": "math_dapo",
    "math_dapo_reasoning": "math_dapo",
    "aime*": "math_dapo",
    "numina_aops_forum": "prime_math",
    "numina_synthetic_math": "prime_math",
    "numina_amc_aime": "prime_math",
    "numina_synthetic_amc": "prime_math",
    "numina_cn_k12": "prime_math",
    "numina_olympiads": "prime_math",
    "codecontests": "programs",
    "code_contests": "programs",
    "apps": "programs",
    "codeforces": "programs",
    "taco": "programs",
    "searchR1_*": "search_r1",
    "hiyouga/geometry3k": "geo3k",
    "hybridrl/colours": "colours",
    "gsm8k": "gsm8k_answer",
    "math500": "prime_math",
    "gpqa": "choice_letter",
    "humaneval": "function_checks",
    "livecodebench": "contest_programs",
    "ifeval": "instructions",
}


def find(table: dict[str, str], data_source: str) -> str | None:
    """The entry of a data source, wildcards included."""
    if data_source in table:
        return table[data_source]
    for name, value in table.items():
        if name.endswith("*") and data_source.startswith(name[:-1]):
            return value
    return None


def check_data_source(data_source: Any, column: str = "data_source") -> None:
    """Refuse a data source that has no built-in scorer.

    Args:
        data_source: the value in the data.
        column: the column that holds it (`data.reward_fn_key`).

    Raises:
        RewardError: lists the known ones and says how to use a custom function.
    """
    if isinstance(data_source, str) and find(SCORERS, data_source) is not None:
        return
    own = (
        "To score with a custom function, set reward.custom_reward_function.path=FILE.py, where FILE.py defines "
        "compute_score(data_source, solution_str, ground_truth, extra_info) and returns a number."
    )
    source = "no data source" if data_source in (None, "") else f"unknown data source {data_source!r}"
    raise RewardError(f"{source} in column {column!r}. Built-in scorers exist for: {', '.join(SCORERS)}. {own}")


def reference_text(ground_truth: Any, data_source: Any = None) -> str:
    """Return a reference answer as the text that the scorers compare.

    Raises:
        RewardError: it is missing, or neither text nor a finite number, so that no answer could be right.
    """
    if isinstance(ground_truth, str) and ground_truth.strip():
        return ground_truth
    if ground_truth is None or isinstance(ground_truth, str):
        raise RewardError(
            f"no ground truth for data source {data_source!r}: the column 'reward_model' must hold "
            '{"style": "rule", "ground_truth": ANSWER}. Add it, or score with a custom function that needs none '
            "(reward.custom_reward_function.path)."
        )
    if isinstance(ground_truth, (int, float)) and not isinstance(ground_truth, bool) and math.isfinite(ground_truth):
        return str(int(ground_truth)) if ground_truth == int(ground_truth) else str(ground_truth)
    raise RewardError(
        f"the ground truth of data source {data_source!r} is {str(ground_truth)[:60]} ({type(ground_truth).__name__}), "
        "with which no answer could be right: the built-in scorers compare with text or a number. Write it as text, or "
        "score with a custom function (reward.custom_reward_function.path)."
    )


def scorer_of(data_source: str) -> ModuleType:
    """The module that scores a data source, which `check_data_source` accepts."""
    return importlib.import_module(f"{__name__}.{find(SCORERS, data_source)}")


def check_ground_truth(ground_truth: Any, data_source: Any) -> None:
    """Refuse a ground truth that the scorer of its data source cannot score with.

    Raises:
        RewardError: see `reference_text`, and `check_ground_truth` of the scorer.
    """
    module = scorer_of(data_source)
    own, of_text = getattr(module, "check_ground_truth", None), getattr(module, "check_reference", None)
    text = reference_text(ground_truth, data_source) if own is None else ""
    try:
        if own is not None:
            own(ground_truth)
        elif of_text is not None:
            of_text(text)
    except RewardError as error:
        raise RewardError(f"data source {data_source!r}: {error}") from None


def check_machine(data_sources: Iterable[str], sandbox: Mapping[str, Any]) -> None:
    """Have scorers that run programs try whether they can.

    Args:
        data_sources: of the data.
        sandbox: `sandbox_fusion_url`, `memory_limit_mb`, `max_concurrent` and `allow_unisolated`, as
            `default_compute_score` takes them.

    Raises:
        RewardError: no program runs.
    """
    for module in {scorer_of(source) for source in data_sources}:
        if hasattr(module, "check_machine"):
            module.check_machine(**sandbox)


def default_compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: dict[str, Any] | None = None,
    sandbox_fusion_url: str | None = None,
    concurrent_semaphore: Any = None,
    memory_limit_mb: int | None = None,
    max_concurrent: int | None = None,
    allow_unisolated: bool | None = None,
    **kwargs: Any,
) -> float | dict[str, Any]:
    """Score one response by its data source.

    Args:
        data_source: chooses the scorer; see `SCORERS`.
        solution_str: the response as text.
        ground_truth: the reference answer.
        extra_info: further information of the row; the built-in scorers do not use it.
        sandbox_fusion_url, concurrent_semaphore, memory_limit_mb, max_concurrent, allow_unisolated: of the sandbox, for
            scorers that run programs; see `score.programs`.
        kwargs: further arguments of the scorer, such as `method="flexible"` of gsm8k
            (`reward.custom_reward_function.reward_kwargs`).

    Returns:
        A number, or a dict with `score` and further results of the scorer (`acc`, `pred`).

    Raises:
        RewardError: the data source is unknown, or the ground truth is none that its scorer can score with.
    """
    check_data_source(data_source)
    module = scorer_of(data_source)
    if hasattr(module, "check_machine"):
        sandbox = {
            "sandbox_fusion_url": sandbox_fusion_url,
            "concurrent_semaphore": concurrent_semaphore,
            "memory_limit_mb": memory_limit_mb,
            "max_concurrent": max_concurrent,
            "allow_unisolated": allow_unisolated,
        }
        kwargs |= {name: value for name, value in sandbox.items() if value is not None}
    truth = ground_truth if hasattr(module, "check_ground_truth") else reference_text(ground_truth, data_source)
    result = module.compute_score(solution_str, truth, **kwargs)
    return result if isinstance(result, dict) else float(result)
