"""A reward function: loaded from a file, called by its signature, its result checked.

Imported by the pool's processes, so it must stay light: no torch, no numpy.
"""

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from hybridrl.errors import RewardError
from hybridrl.utils.user_code import defined_in, load_module

Form = Literal["sample", "batch"]

PATH_KEY = "reward.custom_reward_function.path"
NAME_KEY = "reward.custom_reward_function.name"
KWARGS_KEY = "reward.custom_reward_function.reward_kwargs"

_SAMPLE_NAMES = ("data_source", "solution_str", "ground_truth", "extra_info")
_BATCH_NAMES = ("data_sources", "solution_strs", "ground_truths", "extra_infos")
_SHORT_BATCH_NAMES = ("responses", "ground_truths")
_EXPECTED = (
    "Write it as compute_score(data_source, solution_str, ground_truth, extra_info) for one sample, or as "
    "compute_reward(responses, ground_truths) for a whole batch"
)


@dataclass(frozen=True)
class RewardFunction:
    """Which function scores: everything that a process needs to load it.

    Attributes:
        path: the user's Python file (or `pkg://package.module`); None: the built-in scorers.
        name: the function in it; None: `compute_score`, else `compute_reward`, else the only public function.
        kwargs: further arguments.
        form: how to call a function whose parameter names do not show it: for one sample or for a batch.
    """

    path: str | None = None
    name: str | None = None
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    form: Form = "sample"

    @property
    def label(self) -> str:
        """How messages refer to it."""
        return f"{self.name or 'the reward function'} in {self.path}" if self.path else "the built-in scorers"


@dataclass(frozen=True)
class Sample:
    """One response to score."""

    data_source: Any
    solution_str: str
    ground_truth: Any
    extra_info: dict[str, Any]


class BadScore(Exception):
    """A function returned something that is not a score; the message completes "the function ..."."""


class LoadedFunction:
    """A function that can be called.

    Attributes:
        form: `sample` or `batch`.
        is_async: a call returns an awaitable.
        label: its name and file, for messages.
    """

    def __init__(
        self, call: Callable[..., Any], form: Form, is_async: bool, label: str, names: tuple[str, ...], by_name: bool
    ):
        self._call = call
        self.form = form
        self.is_async = is_async
        self.label = label
        self._names = names
        self._by_name = by_name
        self.kwargs: dict[str, Any] = {}

    def __call__(self, sample: Sample) -> Any:
        """Call for one sample; the raw result, or an awaitable of it."""
        values = (sample.data_source, sample.solution_str, sample.ground_truth, sample.extra_info)
        return self._with(dict(zip(_SAMPLE_NAMES, values, strict=True)))

    def batch(self, samples: Sequence[Sample]) -> Any:
        """Call for all samples at once; the raw result, or an awaitable of it."""
        solutions, truths = [s.solution_str for s in samples], [s.ground_truth for s in samples]
        return self._with(
            {
                "data_sources": [s.data_source for s in samples],
                "solution_strs": solutions,
                "responses": solutions,
                "ground_truths": truths,
                "extra_infos": [s.extra_info for s in samples],
            }
        )

    def _with(self, values: dict[str, Any]) -> Any:
        if self._by_name:
            return self._call(**{name: values[name] for name in self._names}, **self.kwargs)
        return self._call(*(values[name] for name in self._names), **self.kwargs)


def load(function: RewardFunction) -> LoadedFunction:
    """Import the function and determine how to call it.

    Raises:
        RewardError: no such file or function, it fails to import, or its parameters do not fit.
    """
    if function.path is None:
        from hybridrl.reward.score import default_compute_score

        loaded = LoadedFunction(default_compute_score, "sample", False, function.label, _SAMPLE_NAMES, True)
        loaded.kwargs = dict(function.kwargs)
        return loaded
    module = load_module(function.path, PATH_KEY, RewardError)
    name, call = _choose(module, function)
    return _understand(call, name, function)


def _choose(module: Any, function: RewardFunction) -> tuple[str, Callable[..., Any]]:
    public = defined_in(module, inspect.isfunction)
    listed = ", ".join(public) or "none"
    if function.name is not None:
        call = getattr(module, function.name, None)
        if not callable(call) or inspect.isclass(call):
            raise RewardError(
                f"{NAME_KEY}={function.name}: no such function in {function.path}. Functions found there: {listed}."
            )
        return function.name, call
    for name in ("compute_score", "compute_reward", *(public if len(public) == 1 else ())):
        if callable(getattr(module, name, None)):
            return name, getattr(module, name)
    raise RewardError(
        f"{PATH_KEY}={function.path}: it is not clear which function scores, because none is called compute_score "
        f"or compute_reward. Functions found there: {listed}. Set {NAME_KEY} to one of them."
    )


def _understand(call: Callable[..., Any], name: str, function: RewardFunction) -> LoadedFunction:
    label = f"{name} in {function.path}"
    try:
        parameters = inspect.signature(call).parameters
    except (TypeError, ValueError) as error:
        raise RewardError(
            f"{NAME_KEY}={name}: the parameters of {label} cannot be read ({error}). {_EXPECTED}."
        ) from error
    is_async = inspect.iscoroutinefunction(call) or inspect.iscoroutinefunction(getattr(call, "__call__", None))  # noqa: B004 (the attribute itself is inspected, not its presence)
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    named = [p.name for p in parameters.values() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    form: Form
    if "responses" in named or "solution_strs" in named:
        form, known = (
            "batch",
            _BATCH_NAMES if "solution_strs" in named else (*_SHORT_BATCH_NAMES, "data_sources", "extra_infos"),
        )
        chosen, by_name = (
            tuple(n for n in known if n in named or (takes_any and n in _BATCH_NAMES and "solution_strs" in named)),
            True,
        )
    elif "solution_str" in named or (takes_any and not _positional(parameters)):
        form, chosen, by_name = "sample", tuple(n for n in _SAMPLE_NAMES if n in named or takes_any), True
    else:
        form, chosen, by_name = _by_position(parameters, name, function)
    _check_call(call, label, chosen, by_name, function, named, takes_any)
    loaded = LoadedFunction(call, form, is_async, label, chosen, by_name)
    loaded.kwargs = dict(function.kwargs)
    return loaded


def _positional(parameters: Mapping[str, inspect.Parameter]) -> list[inspect.Parameter]:
    """Parameters without a default that can be given by position."""
    return [
        p
        for p in parameters.values()
        if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) and p.default is p.empty
    ]


def _by_position(
    parameters: Mapping[str, inspect.Parameter], name: str, function: RewardFunction
) -> tuple[Form, tuple[str, ...], bool]:
    """A function with other parameter names: their number and the manager decide how to call it."""
    count = len([p for p in _positional(parameters) if p.name not in function.kwargs])
    if name == "compute_reward" and count == 2:
        return "batch", _SHORT_BATCH_NAMES, False
    if count in (3, 4):
        names = _BATCH_NAMES if function.form == "batch" else _SAMPLE_NAMES
        return function.form, names[:count], False
    given = ", ".join(parameters) or "nothing"
    raise RewardError(f"{PATH_KEY}={function.path}: {name} takes ({given}), which is not a known form. {_EXPECTED}.")


def _check_call(
    call: Callable[..., Any],
    label: str,
    chosen: tuple[str, ...],
    by_name: bool,
    function: RewardFunction,
    named: list[str],
    takes_any: bool,
) -> None:
    unknown = [key for key in function.kwargs if key not in named and not takes_any]
    if unknown:
        raise RewardError(f"{KWARGS_KEY}: {label} has no parameter {unknown[0]!r}. Its parameters: {', '.join(named)}.")
    try:
        if by_name:
            inspect.signature(call).bind(**dict.fromkeys(chosen), **function.kwargs)
        else:
            inspect.signature(call).bind(*chosen, **function.kwargs)
    except TypeError as error:
        raise RewardError(
            f"{PATH_KEY}={function.path}: {label} cannot be called with ({', '.join((*chosen, *function.kwargs))}): "
            f"{error}. {_EXPECTED}; pass further arguments with {KWARGS_KEY}."
        ) from error


def check_score(value: Any) -> tuple[float, dict[str, Any] | None]:
    """A function's result as a score and, from a dict, everything in it.

    Raises:
        BadScore: not a number or a dict with a number `score`, or not finite.
    """
    if isinstance(value, Mapping):
        if "score" not in value:
            raise BadScore(f"returned a dict without 'score' (keys: {', '.join(map(str, value)) or 'none'})")
        extra = {str(key): _plain(item, str(key)) for key, item in value.items()}
        extra["score"] = _number(value["score"])
        return extra["score"], extra
    return _number(value), None


def check_scores(values: Any, count: int) -> list[tuple[float, dict[str, Any] | None]]:
    """The result of a batched function: one score per sample.

    Raises:
        BadScore: not a sequence, of another length, or a bad score in it (named by its position).
    """
    values = values.tolist() if hasattr(values, "tolist") else values
    if not isinstance(values, Sequence) or isinstance(values, str):
        raise BadScore(f"returned {type(values).__name__} instead of a list of {count} scores")
    if len(values) != count:
        raise BadScore(f"returned {len(values)} scores for {count} responses")
    scores = []
    for number, value in enumerate(values):
        try:
            scores.append(check_score(value))
        except BadScore as error:
            raise BadScore(f"{error} for response {number} of {count}") from None
    return scores


def _number(value: Any) -> float:
    if hasattr(value, "item") and not isinstance(value, (int, float)):
        try:
            value = value.item()  # a scalar of numpy or torch
        except Exception as error:
            raise BadScore(f"returned {type(value).__name__} that is not a single number ({error})") from None
    if not isinstance(value, (bool, int, float)):
        shown = repr(value)
        raise BadScore(
            f"returned {type(value).__name__} {shown[:60]}; a score must be a number, or a dict with a number 'score'"
        )
    number = float(value)
    if not math.isfinite(number):
        raise BadScore(f"returned {number}; a score must be finite")
    return number


def _plain(value: Any, key: str) -> Any:
    """The value as numbers, text, lists and dicts, which can be written to a dump."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Mapping):
        return {str(name): _plain(item, key) for name, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_plain(item, key) for item in value]
    if hasattr(value, "tolist"):
        return value.tolist()
    if hasattr(value, "item"):
        return value.item()
    raise BadScore(
        f"returned {type(value).__name__} under {key!r}; besides 'score', a dict may hold numbers, text, lists and "
        "dicts"
    )
