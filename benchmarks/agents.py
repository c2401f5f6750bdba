"""What sessions cost besides the model and the tools: many at once, and requests through the gateway.

    python benchmarks/agents.py                     # 256 sessions with tools that wait 0.1 to 2 s, on the controller
    python benchmarks/agents.py --workers 2         # the same in worker processes
    python benchmarks/agents.py gateway             # requests to a vLLM replica, directly and through the gateway

`sessions` has a scripted model, which answers after a fixed time with calls of a tool that waits. Everything else is
what a run uses: the loop `tool_agent`, the parser, the chat template, the record of tokens. The ideal schedule has no
cost besides the model and the tools, and runs all sessions side by side: it ends with the longest session. The last
line is the wall time over that of the ideal schedule: at most 1.3.

`gateway` sends the same prompt for the same number of tokens in two ways, in turns: with the client that training uses,
in this process, and as a chat completion of a session, over HTTP from this process. It prints medians of the time of
a request, with one request at a time and with 16, and their difference: the gateway's overhead per request.
"""

import argparse
import asyncio
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from hybridrl.agents import AgentRollout, create_agents
from hybridrl.config import load_config
from hybridrl.models.info import tokenizer_of
from hybridrl.models.tiny import build_tiny_model
from hybridrl.protocol import DataProto, object_array
from hybridrl.rollout import Rollout
from hybridrl.rollout.request import Completion, Request
from hybridrl.rollout.sampling import SamplingParams
from hybridrl.single_controller.ray import init_ray, shutdown_ray

LIMIT = 1.3
ROLLOUT = "actor_rollout_ref.rollout"
TOOL = '''
import time
from hybridrl.agents import function_tool


@function_tool
def wait(seconds: float) -> str:
    """Wait.

    Args:
        seconds: how long.
    """
    time.sleep(seconds)
    return "done"
'''


class ScriptedRollout(Rollout):
    """A model that calls the tool as its script says, and then answers.

    Args:
        latency: seconds of a request.
        tokenizer: writes the turns.
    """

    version = 0

    def __init__(self, latency: float, tokenizer: Any) -> None:
        self._latency, self._tokenizer = latency, tokenizer

    def say(self, scripts: Mapping[str, Sequence[float]]) -> None:
        """Take the scripts of the next sessions: session -> the seconds that each of its calls waits."""
        self._scripts, self._turns = scripts, dict.fromkeys(scripts, 0)

    def client(self) -> Any:
        return self

    async def generate(self, request: Request) -> Completion:  # type: ignore[override]
        await asyncio.sleep(self._latency)
        turn, script = self._turns[request.session], self._scripts[request.session]
        self._turns[request.session] += 1
        call = json.dumps({"name": "wait", "arguments": {"seconds": script[turn]}}) if turn < len(script) else ""
        text = f"<tool_call>{call}</tool_call>" if call else "The answer is 7."
        tokens = [*self._tokenizer(text)["input_ids"], self._tokenizer.eos_token_id]
        return Completion(request.id, tokens, [-1.0] * len(tokens), "stop", [(0, len(tokens))])

    def update_weights(self, version: int) -> dict[str, float]:
        raise NotImplementedError


def prompts_of(tokenizer: Any, schemas: Sequence[Any], count: int) -> DataProto:
    """The same prompt for each session."""
    messages = [{"role": "user", "content": "Wait for a while, then answer."}]
    text = tokenizer.apply_chat_template(messages, tools=list(schemas), tokenize=False, add_generation_prompt=True)
    ids = torch.tensor([tokenizer(text)["input_ids"]] * count)
    mask = torch.ones_like(ids)
    return DataProto.from_dict(
        tensors={"input_ids": ids, "attention_mask": mask, "position_ids": mask.cumsum(1) - 1},
        non_tensors={
            "uid": object_array([f"0-{number}" for number in range(count)]),
            "sample": object_array([0] * count),
            "raw_prompt": object_array([messages] * count),
        },
    )


def sessions(arguments: argparse.Namespace, folder: Path) -> int:
    """Many sessions with tools that wait, against the ideal schedule."""
    model = build_tiny_model(folder / "model", hidden=32, layers=1, heads=2, kv_heads=1)
    (folder / "tool.py").write_text(TOOL)
    words = [
        f"actor_rollout_ref.model.path={model}",
        f"{ROLLOUT}.multi_turn.enable=True",
        f"{ROLLOUT}.multi_turn.function_tool_path={folder / 'tool.py'}",
        f"{ROLLOUT}.prompt_length=1000",
        f"{ROLLOUT}.response_length=2000",
        f"{ROLLOUT}.agent.num_workers={arguments.workers}",
    ]
    if arguments.workers:
        init_ray({"address": "local", "include_dashboard": False}, use_gpu=False)
    config = load_config("ppo_trainer", words)
    tokenizer = tokenizer_of(config.actor_rollout_ref.model)
    agents = create_agents(config, tokenizer, [])
    assert agents is not None
    draw = random.Random(0)
    ratios = []
    inner = ScriptedRollout(arguments.latency, tokenizer)
    rollout = AgentRollout(inner, agents)
    for number in range(arguments.rounds + 1):  # the first imports what is still missing
        scripts = {
            f"0-{one}/0": [draw.uniform(0.1, 2.0) for _ in range(draw.randint(1, arguments.calls))]
            for one in range(arguments.sessions)
        }
        inner.say(scripts)
        prompts = prompts_of(tokenizer, [tool.tool_schema for tool in agents.tools.values()], arguments.sessions)
        started, used = time.perf_counter(), time.process_time()
        batch = rollout.generate(prompts)
        wall, processor = time.perf_counter() - started, time.process_time() - used
        if len(batch) != arguments.sessions or (batch.non_tensor_batch["tool_call_counts"] < 1).any():
            raise SystemExit("a session was lost, or called no tool")
        ideal = max(sum(script) + arguments.latency * (len(script) + 1) for script in scripts.values())
        if number:
            ratios.append(wall / ideal)
            print(
                f"wall {wall:6.2f} s, ideal {ideal:6.2f} s, processor time here {processor:5.2f} s",
                flush=True,
            )
    rollout.close()
    shutdown_ray()
    ratio = statistics.median(ratios)
    what = f"{arguments.sessions} sessions, {arguments.workers} workers"
    print(f"\n{what}: wall time / ideal schedule {ratio:.2f} (at most {LIMIT})")
    return int(ratio > LIMIT)


async def seconds_of(ask: Callable[[int], Awaitable[None]], count: int, side_by_side: int) -> list[float]:
    """Seconds of each of `count` requests, so many at a time."""
    places, found = asyncio.Semaphore(side_by_side), []

    async def one(number: int) -> None:
        async with places:
            started = time.perf_counter()
            await ask(number)
            found.append(time.perf_counter() - started)

    await asyncio.gather(*(one(number) for number in range(count)))
    return found


async def compare(arguments: argparse.Namespace, client: Any, access: Any, model: Any, settings: Any) -> None:
    """Print the medians of both ways."""
    import httpx

    tokenizer = tokenizer_of(model)
    messages = [{"role": "user", "content": "How much is 37 * 58 + 12? " * 4}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    prompt = tokenizer(text)["input_ids"]
    sampling = SamplingParams.from_meta(settings, {"max_new_tokens": arguments.tokens, "ignore_eos": True})
    numbers = iter(range(10**9))
    root, key = access.url.removesuffix("/v1"), {"Authorization": f"Bearer {access.token}"}

    async def bare(_: int) -> None:
        answer = await client.generate(Request(f"bare-{next(numbers)}", prompt, sampling))
        assert len(answer.token_ids) == arguments.tokens

    limits = httpx.Limits(max_connections=arguments.side_by_side)
    async with httpx.AsyncClient(base_url=root, timeout=120, limits=limits) as http:

        async def opened() -> str:
            body = {"sampling_params": {"ignore_eos": True}}
            answer = await http.post("/sessions", json=body, headers=key)
            answer.raise_for_status()
            return str(answer.json()["id"])

        async def served(number: int) -> None:
            body = {"model": access.model, "messages": messages, "max_tokens": arguments.tokens}
            answer = await http.post(f"/sessions/{names[number]}/v1/chat/completions", json=body)
            answer.raise_for_status()
            assert answer.json()["usage"]["completion_tokens"] == arguments.tokens, answer.text

        for side_by_side in (1, arguments.side_by_side):
            found: dict[str, list[float]] = {"bare engine": [], "gateway": []}
            for number in range(arguments.rounds + 1):
                names = [await opened() for _ in range(arguments.requests)]
                for name, ask in (("bare engine", bare), ("gateway", served)):
                    took = await seconds_of(ask, arguments.requests, side_by_side)
                    found[name] += took if number else []
                for name in names:
                    (await http.delete(f"/sessions/{name}", headers=key)).raise_for_status()
            medians = {name: 1000 * statistics.median(values) for name, values in found.items()}
            over = medians["gateway"] - medians["bare engine"]
            told = ", ".join(f"{name} {value:.1f} ms" for name, value in medians.items())
            print(f"{side_by_side} at a time, {arguments.tokens} tokens: {told}; overhead {over:.1f} ms", flush=True)


def gateway(arguments: argparse.Namespace, folder: Path) -> int:
    """Requests to a vLLM replica, directly and through the gateway."""
    import ray

    from hybridrl.rollout.inference_engine import EngineSpec
    from hybridrl.rollout.replicas.replica_handle import PoolSettings, ReplicaPlacement
    from hybridrl.rollout.replicas.replica_supervisor import Supervisor
    from hybridrl.rollout.rollout import ReplicatedRollout
    from hybridrl.serve import make_server
    from hybridrl.single_controller import RayResourcePool

    model = build_tiny_model(folder / "model")
    ray.init(num_cpus=2, include_dashboard=False, logging_level="ERROR")
    words = [
        f"actor_rollout_ref.model.path={model}",
        f"{ROLLOUT}.dtype=float32",
        f"{ROLLOUT}.prompt_length=512",
        f"{ROLLOUT}.response_length=128",
        f"{ROLLOUT}.server.enable=True",
    ]
    config = load_config("ppo_trainer", words).actor_rollout_ref
    group, bundle = RayResourcePool([1], use_gpu=False).slots()[0]
    spec = EngineSpec(config.rollout, config.model, (1,), 0, load_weights=True, threads=1)
    placement = ReplicaPlacement(group, bundle, ray.get_runtime_context().get_node_id())
    pool = Supervisor(PoolSettings("vllm", spec, log_folder=folder / "logs"), [placement])
    pool.start()
    client = ReplicatedRollout(pool).client()
    server, access = make_server(config.rollout, config.model, client)
    try:
        server.start()
        server.wait_ready()
        asyncio.run(compare(arguments, client, access, config.model, config.rollout))
    finally:
        server.stop()
        pool.close()
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Run one of the two."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("what", nargs="?", default="sessions", choices=("sessions", "gateway"))
    parser.add_argument("--rounds", type=int, default=3, help="measurements, after a first one that does not count (3)")
    parser.add_argument("--sessions", type=int, default=256, help="sessions at once (256)")
    parser.add_argument("--workers", type=int, default=0, help="processes that run sessions; 0: the controller (0)")
    parser.add_argument("--calls", type=int, default=4, help="calls of a session: 1 to this many (4)")
    parser.add_argument("--latency", type=float, default=0.05, help="seconds of a request to the scripted model (0.05)")
    parser.add_argument("--requests", type=int, default=100, help="gateway: requests of a round (100)")
    parser.add_argument("--side-by-side", type=int, default=16, help="gateway: requests at a time (16)")
    parser.add_argument("--tokens", type=int, default=16, help="gateway: tokens of an answer (16)")
    arguments = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        return (sessions if arguments.what == "sessions" else gateway)(arguments, Path(folder))


if __name__ == "__main__":
    sys.exit(main())
