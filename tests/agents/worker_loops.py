"""Loops of a user for sessions in worker processes: one that ends its process, and some that see where they are."""

import asyncio
import os
import signal
import threading
import time
from pathlib import Path

from hybridrl.agents import AgentLoopBase, AgentLoopOutput, register


class OneTurn(AgentLoopBase):
    async def run(self, sampling_params, **row):
        await self.before(row)
        prompt = list(row["prompt_ids"])
        made = await self.server_manager.generate(prompt_ids=prompt, sampling_params={"max_tokens": 4})
        mask = [1] * len(made.token_ids)
        return AgentLoopOutput(prompt, made.token_ids, mask, extra_fields=self.extra())

    async def before(self, row) -> None: ...

    def extra(self):
        return {"pid": os.getpid()}


@register("tells_its_process")
class TellsItsProcess(OneTurn):
    pass


@register("dies")
class Dies(OneTurn):
    """Where `dies` names a file, the process is killed, once; other sessions wait until then."""

    async def before(self, row) -> None:
        mark, victim = Path(row["mark"]), row["uid"] == "0-0"
        (mark / f"{row['uid']} {os.getpid()} {time.time_ns()}").touch()
        if victim and not (mark / "killed").exists():
            while len(list(mark.glob("0-* *"))) < row["most"]:  # all sessions run
                await asyncio.sleep(0.01)
            (mark / "killed").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        while not (mark / "killed").exists():
            await asyncio.sleep(0.01)


@register("unsendable")
class Unsendable(OneTurn):
    """Returns what no other process can have, leaves by `sys.exit`, cancels itself, or raises an error of its own."""

    ends = ""

    async def before(self, row) -> None:
        self.ends = row["ends"]
        if self.ends == "exits":
            raise SystemExit(3)
        if self.ends == "cancels":
            raise asyncio.CancelledError
        if self.ends == "raises":
            raise type("OwnError", (Exception,), {})("the disk is full")

    def extra(self):
        return {"thing": threading.Lock() if self.ends == "lock" else None}


@register("counts_sessions")
class CountsSessions(OneTurn):
    """Notes in files how many sessions run at once, and goes on once `together` of them have met."""

    async def before(self, row) -> None:
        folder = Path(row["folder"])
        own = folder / f"running {row['uid']}"
        own.touch()
        async with asyncio.timeout(60):  # however busy the machine is
            while True:
                count = len(list(folder.glob("running *")))
                (folder / f"most {count}").touch()
                if any(int(file.name.split()[1]) >= row["together"] for file in folder.glob("most *")):
                    break
                await asyncio.sleep(0.01)
        await asyncio.sleep(0.05)  # in which one too many would be counted
        own.unlink()


@register("waits_forever")
class WaitsForever(OneTurn):
    async def before(self, row) -> None:
        (Path(row["folder"]) / f"{row['uid']} {os.getpid()}").touch()
        await asyncio.sleep(1000)
