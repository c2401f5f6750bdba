"""Answers as the bridge to verifiers 0.4.0 did: an ASGI application, whose rollout is one turn."""

import os

import httpx
from fastapi import FastAPI, Request

TASKS = [
    {"idx": n, "prompt": f"Write {letter}.", "system_prompt": None, "letter": letter} for n, letter in enumerate("abc")
]
app = FastAPI()


@app.get("/health")
def health():
    return {"status": "healthy"}


@app.get("/tasks")
def tasks(limit: int | None = None):
    return TASKS[:limit]


@app.post("/run")
async def run(request: Request):
    body = await request.json()
    task = body["task"]
    messages = [{"role": "user", "content": task["prompt"]}]
    async with httpx.AsyncClient(trust_env=False, timeout=None) as client:
        sent = {"model": body["model"], "messages": messages, "max_tokens": 6}
        answer = await client.post(f"{body['base_url']}/chat/completions", json=sent)
        answer.raise_for_status()
    kind = task.get("kind")
    if kind == "dies":
        os._exit(3)
    if kind in ("infra", "grading", "timeout"):
        return {"failed": kind, "detail": f"{kind} of the task"}
    extra = {"metric_length": 4.0, "reward_share": 0.25, "stop_condition": "agent_completed"}
    return {"score": 0.5, "extra": extra}
