"""What our bridge calls of verifiers 0.4.0 (which takes 332 MB): modules with its names, and a rollout of one turn.

A copy of this file is the module `verifiers` of a test's environment, so that the bridge itself runs.
"""

import asyncio
import contextlib
import multiprocessing
import os
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import httpx

TASKS = [
    {"idx": n, "prompt": f"Write {letter}.", "system_prompt": None, "letter": letter} for n, letter in enumerate("abc")
]


class Data:
    def __init__(self, **fields):
        self.fields = fields

    def model_dump(self, mode):
        assert mode == "json"
        return self.fields


def resolve_env_config(block):
    agents = {name: SimpleNamespace(client=one.get("client")) for name, one in block.items() if name != "taskset"}
    return SimpleNamespace(env_id=block["taskset"]["id"], agents=agents or {"agent": SimpleNamespace(client=None)})


def agent_config_fields(config):
    return config.agents


def load_environment(config):
    return SimpleNamespace(taskset=[SimpleNamespace(data=Data(**task)) for task in TASKS])


def env_config_data(config):
    return {"id": config.env_id}


def serve_env(max_workers, address, config_data, address_queue, death_pipe):
    address_queue.put(f"tcp://127.0.0.1:1/{config_data['id']}")
    with contextlib.suppress(EOFError):
        death_pipe.recv()


class EvalClientConfig:
    def __init__(self, base_url, api_key_var):
        self.base_url, self.api_key_var = base_url, api_key_var


class SamplingConfig:
    pass


class EnvClient:
    """Talks to the server, which is the only one that rolls out; here the client does."""

    def __init__(self, address):
        assert address == "tcp://127.0.0.1:1/letters_tasks", address

    async def wait_for_server_startup(self, timeout):
        pass

    async def close(self):
        pass

    async def run(self, client, model, sampling, task):
        assert isinstance(client, EvalClientConfig) and isinstance(sampling, SamplingConfig)
        kind = task.get("kind")
        if kind == "hangs":
            Path(task["file"]).write_text("began")
            try:
                await asyncio.sleep(600)
            except asyncio.CancelledError:
                Path(task["file"]).write_text("given up")
                raise
        messages = [{"role": "user", "content": task["prompt"]}]
        async with httpx.AsyncClient(trust_env=False, timeout=None) as http:
            sent = {"model": model, "messages": messages, "max_tokens": 6}
            answer = await http.post(f"{client.base_url}/chat/completions", json=sent)
            answer.raise_for_status()
        if kind == "dies":
            os._exit(3)
        if kind == "server_dies":
            (server,) = multiprocessing.active_children()
            server.kill()
            server.join()
            raise RuntimeError("the server does not answer")
        types = {"infra": "HarnessError", "grading": "TaskError", "timeout": "TimeoutError"}
        errors = [SimpleNamespace(type=types[kind], message=f"{kind} of the task")] if kind in types else []
        trace = SimpleNamespace(
            agent=SimpleNamespace(trainable=True),
            errors=errors,
            is_timeout=kind == "timeout",
            ok=not errors,
            rewards={"share": SimpleNamespace(score=0.25, weight=2.0)},
            reward=0.5,
            metrics={"length": 4.0},
            stop_condition="agent_completed",
        )
        return SimpleNamespace(errors=[], is_timeout=False, ok=not errors, traces=[trace])


_MODULES = {
    "v1": (),
    "v1.configs": (),
    "v1.configs.agent": (agent_config_fields,),
    "v1.configs.client": (EvalClientConfig,),
    "v1.serve": (EnvClient, env_config_data, serve_env),
    "v1.types": (SamplingConfig,),
    "v1.utils": (),
    "v1.utils.loaders": (load_environment, resolve_env_config),
}
if __name__ == "verifiers":
    for place, objects in _MODULES.items():
        module = sys.modules[f"verifiers.{place}"] = ModuleType(f"verifiers.{place}")
        for one in objects:
            setattr(module, one.__name__, one)
