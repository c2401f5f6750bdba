"""What a user would write: environments, and a Gymnasium environment with text."""

import time

from hybridrl.agents import Environment, Step, register_environment
from hybridrl.scored import Scored, Unscored

PIECE = 6  # characters that make a step of `Length`


@register_environment("length")
class Length(Environment):
    """Rewards each turn by the number of its characters; done after `steps` turns."""

    log: list = []  # noqa: RUF012  (what every episode saw, for the test)

    def __init__(self, steps: int = 2) -> None:
        super().__init__(steps=steps)
        self.left = steps

    @classmethod
    def start(cls, config):
        cls.log.append("start")
        return config

    @classmethod
    def stop(cls, config) -> None:
        cls.log.append("stop")

    def reset(self, row):
        self.name, self.seen = (row["uid"], row["sample"]), []
        self.log.append((self.name, row["seed"], self.seen))
        return f"{self.left} turns are left."

    async def step(self, action):
        self.left -= 1
        self.seen.append((str(action), action.token_ids))
        return f"{self.left} turns are left.", len(action) / 10, self.left == 0, {"length": len(action)}

    def close(self) -> None:
        self.log.append((self.name, "closed"))


@register_environment("faulty")
class Faulty(Environment):
    """Fails as the row says, for rows that say so."""

    def reset(self, row):
        self.how = row["env_kwargs"].get("how")
        return None

    def step(self, action):
        if self.how == "raises":
            raise ConnectionError("the game server is gone")
        if self.how == "hangs":
            time.sleep(30)
        if self.how == "exits":
            raise SystemExit(3)
        if self.how == "nan":
            return None, float("nan"), True
        if self.how == "nothing":
            return None
        if self.how == "gives_up":
            return None, Unscored("grading", "the move is ambiguous"), True
        return Step(reward=Scored(1.0, {"judged": True}), done=True)


@register_environment("caller")
class Caller(Environment):
    """Declares a tool, and answers calls of it."""

    tools = ({"type": "function", "function": {"name": "echo", "description": "E.", "parameters": {"type": "object"}}},)

    def reset(self, row):
        self.turns = 0
        return [{"role": "user", "content": "Call echo."}]

    def step(self, action):
        self.turns += 1
        return Step(action.answers([f"{len(call.arguments['text'])} characters" for call in action.calls]), 0.5)
