"""A taskset of verifiers 0.4: the share of a letter in what the model says; one of the tasks raises.

It was used with the real package by hand (docs/environments.md); no test imports it."""

import verifiers.v1 as vf

__all__ = ["LettersTaskset"]


class LettersData(vf.TaskData):
    letter: str = "a"


class LettersTask(vf.Task[LettersData]):
    @vf.reward(weight=2.0)
    async def share(self, trace: vf.Trace) -> float:
        if self.data.letter == "!":
            raise ValueError("no such letter")
        said = trace.last_reply or ""
        return said.count(self.data.letter) / max(len(said), 1)

    @vf.metric
    async def length(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply or ""))


class LettersConfig(vf.TasksetConfig):
    pass


class LettersTaskset(vf.Taskset[LettersTask, LettersConfig]):
    def load(self) -> list[LettersTask]:
        return [
            LettersTask(LettersData(prompt=f"Write {letter}.", letter=letter), self.config.task)
            for letter in "abcdefghij!"
        ]
