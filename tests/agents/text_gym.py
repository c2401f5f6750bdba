"""A Gymnasium environment whose observations and actions are text."""

import gymnasium
from gymnasium import spaces


class Target(gymnasium.Env):
    """The reward of a turn is the share of its characters up to the target in the alphabet, which the seed draws."""

    observation_space = spaces.Text(100)
    action_space = spaces.Text(10_000)

    def __init__(self, turns: int = 3) -> None:
        self.turns = turns

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.left = self.turns
        letters = (options or {}).get("letters", "abcdefghijklmnopqrstuvwxyz")
        self.target = letters[int(self.np_random.integers(len(letters)))]
        return f"Write {self.target}.", {"target": self.target, "hidden": object()}

    def step(self, action):
        self.left -= 1
        share = sum(char <= self.target for char in action) / max(len(action), 1)
        return f"Again: {self.target}.", share, False, self.left == 0, {"share": share}


class Numbers(gymnasium.Env):
    """Its observations are numbers."""

    def reset(self, *, seed=None, options=None):
        return 3, {}


gymnasium.register("Target-v0", entry_point=Target, disable_env_checker=True)
gymnasium.register("Numbers-v0", entry_point=Numbers, disable_env_checker=True)
