"""Gymnasium's environments whose observations and actions are text.

The package is imported where such an environment is used; it is the extra `gymnasium`. GEM's environments have the same
interface and work too, where GEM is installed.
"""

from collections.abc import Mapping
from typing import Any

from hybridrl.agents.environments.environment import Action, Environment, Step, register_environment
from hybridrl.errors import RolloutError
from hybridrl.utils.user_code import load_module


@register_environment("gymnasium")
class GymnasiumEnvironment(Environment):
    """An environment of `gymnasium.make`.

    The row's `env_kwargs` may have `seed` and `options`, which `reset` of the environment gets. The episode is done
    where the environment says `terminated` or `truncated`; `extra` is its `info`, without values of other types than
    numbers, text, lists and dicts.

    Args:
        id: of the environment, as `gymnasium.make` takes it; `module:Name-v0` imports a module before.
        module: a file or module that registers it; None: none is needed.
        maker: `package:function` that makes an environment in place of `gymnasium.make`, for example `gem:make`.
        kwargs: further arguments of `make`.
    """

    def __init__(
        self,
        id: str,
        module: str | None = None,
        maker: str = "gymnasium:make",
        kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(id=id, module=module, maker=maker, kwargs=kwargs)
        self.inner = _make(id, module, maker, kwargs)

    @classmethod
    def start(cls, config: dict[str, Any]) -> dict[str, Any]:
        """Make one environment, so that a mistake is found before the run begins."""
        if "id" not in config:
            raise RolloutError("config.id is missing: the name of the environment, as gymnasium.make takes it")
        cls(**config).close()
        return config

    def reset(self, row: Mapping[str, Any]) -> Step:
        """Reset with the seed of `env_kwargs`, or else of the session."""
        kwargs = row.get("env_kwargs") or {}
        seed, options = kwargs.get("seed"), kwargs.get("options")
        seed = int(row["seed"] if seed is None else seed)
        more = {"options": dict(options)} if options is not None else {}
        observation, info = self.inner.reset(seed=seed, **more)
        return Step(_text(observation), extra=_plain(info))

    def step(self, action: Action) -> Step:
        """Give the text of the turn to the environment."""
        observation, reward, terminated, truncated, info = self.inner.step(str(action))
        return Step(_text(observation), float(reward), bool(terminated or truncated), _plain(info))

    def close(self) -> None:
        """Close the environment."""
        if hasattr(self.inner, "close"):
            self.inner.close()


def _make(id: str, module: str | None, maker: str, kwargs: Mapping[str, Any] | None) -> Any:
    if module is not None:
        load_module(module, "config.module", RolloutError)
    package, _, function = maker.partition(":")
    try:
        make = getattr(load_module(package, "config.maker", RolloutError), function)
    except (RolloutError, AttributeError) as error:
        hint = "; bash scripts/install.sh auto gymnasium" if package == "gymnasium" else ""
        raise RolloutError(f"config.maker={maker}: {error}{hint}") from error
    return make(id, **dict(kwargs or {}))


def _text(observation: Any) -> str:
    if not isinstance(observation, str):
        raise RolloutError(
            f"the environment's observation is of type {type(observation).__name__}; only text can be shown to a "
            "language model. Wrap the environment (gymnasium.ObservationWrapper) so that it returns text"
        )
    return observation


def _plain(info: Any) -> dict[str, Any]:
    if not isinstance(info, Mapping):
        return {}
    return {
        str(name): value for name, value in info.items() if isinstance(value, bool | int | float | str | list | dict)
    }
