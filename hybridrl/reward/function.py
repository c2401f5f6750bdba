"""A reward function: its place, its loading in a process, and its calls.

Imported by the pool's processes, so it must stay light: no torch, no numpy.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from hybridrl.errors import RewardError
from hybridrl.reward.signature import SAMPLE_NAMES, Form, RewardCall, Sample, understand
from hybridrl.utils.user_code import OBJECT_SUFFIX, defined_in, load_module, load_pickled

KEY = "reward.custom_reward_function"
#: what a file may define to refuse `reward_kwargs` before a run, by a `RewardError`; it is called with them
CHECK = "check_reward_kwargs"


@dataclass(frozen=True)
class RewardFunction:
    """Which function scores: everything that a process needs to load it.

    Attributes:
        path: the user's Python file (or `pkg://package.module`), or a `.pkl` file that holds a function
            (`hybridrl.reward.reward_settings`); None: the built-in scorers.
        name: the function in it; None: `compute_score`, else `compute_reward`, else the only public function.
        kwargs: further arguments.
        form: how to call a function whose parameter names do not show it: for one sample or for a batch.
        key: the group of settings that names it, for messages.
        part: its name among several functions; None if it is the only one.
    """

    path: str | None = None
    name: str | None = None
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    form: Form = "sample"
    key: str = KEY
    part: str | None = None

    @property
    def label(self) -> str:
        """The name that messages use."""
        named = f"{self.name or self.part or 'the reward function'} in {self.path}" if self.path else None
        return named or "the built-in scorers"


class LoadedFunction:
    """A function that can be called.

    Attributes:
        how: how it is called.
        is_async: a call returns an awaitable.
        label: its name and file, for messages.
    """

    def __init__(self, call: Callable[..., Any], how: RewardCall, label: str, kwargs: Mapping[str, Any]) -> None:
        self._call = call
        self._kwargs = dict(kwargs)
        self.how = how
        self.label = label
        called = getattr(call, "__call__", None)  # noqa: B004 (the attribute itself is inspected, not its presence)
        self.is_async = inspect.iscoroutinefunction(call) or inspect.iscoroutinefunction(called)

    @property
    def form(self) -> Form:
        """`sample` or `batch`."""
        return self.how.form

    def __call__(self, sample: Sample) -> Any:
        """Call for one sample; the raw result, or an awaitable of it."""
        return self.batch([sample])

    def batch(self, samples: Sequence[Sample]) -> Any:
        """Call for all samples at once; the raw result, or an awaitable of it."""
        values = self.how.values(samples)
        first = [values.pop(name) for name in self.how.positional]
        return self._call(*first, **values | self._kwargs)


def load(function: RewardFunction) -> LoadedFunction:
    """Import the function and determine how to call it.

    Raises:
        RewardError: no such file or function, it fails to import, or its parameters do not fit.
    """
    if function.path is None:
        from hybridrl.reward.score import default_compute_score

        return LoadedFunction(
            default_compute_score, RewardCall("sample", SAMPLE_NAMES), function.label, function.kwargs
        )
    if function.path.endswith(OBJECT_SUFFIX):
        call = load_pickled(function.path, f"{function.key}.path", RewardError)
        if not callable(call):
            raise RewardError(
                f"{function.key}.path={function.path}: holds {type(call).__name__}, which cannot be called."
            )
        name = getattr(call, "__name__", type(call).__name__)
    else:
        module = load_module(function.path, f"{function.key}.path", RewardError)
        name, call = _choose(module, function)
        if callable(check := getattr(module, CHECK, None)):
            check(**function.kwargs)
    source = f"{function.key}.path={function.path}"
    how = understand(call, name, function.kwargs, function.form, source, f"{function.key}.reward_kwargs")
    if function.part is None:  # a function that is alone has to score every sample
        how = replace(how, may_abstain=False)
    return LoadedFunction(call, how, f"{name} in {function.path}", function.kwargs)


def _choose(module: Any, function: RewardFunction) -> tuple[str, Callable[..., Any]]:
    public = [name for name in defined_in(module, inspect.isfunction) if name != CHECK]
    listed = ", ".join(public) or "none"
    if function.name is not None:
        call = getattr(module, function.name, None)
        if not callable(call) or inspect.isclass(call):
            raise RewardError(
                f"{function.key}.name={function.name}: no such function in {function.path}. Functions found there: "
                f"{listed}."
            )
        return function.name, call
    usual_names = ("compute_score", "compute_reward", *(public if len(public) == 1 else ()))
    for name in (*([function.part] if function.part in public else ()), *usual_names):
        if callable(getattr(module, name, None)):
            return name, getattr(module, name)
    called = f"{function.part}, compute_score" if function.part else "compute_score"
    raise RewardError(
        f"{function.key}.path={function.path}: it is not clear which function scores, because none is called {called} "
        f"or compute_reward. Functions found there: {listed}. Set {function.key}.name to one of them."
    )
