"""A server whose answers have the form of those of an echo environment of openenv 0.10.0; an ASGI application."""

import json
import os

from fastapi import FastAPI, WebSocket, WebSocketDisconnect

MISSING = {"type": "missing", "loc": ["message"], "msg": "Field required", "input": {}, "url": "https://errors"}
app = FastAPI()
open_now = 0


@app.get("/health")
def health():
    return {"status": "healthy"}


def answer(kind: str, data: dict) -> str:
    return json.dumps({"type": kind, "data": data})


@app.websocket("/ws")
async def ws(socket: WebSocket) -> None:
    global open_now
    await socket.accept()
    if open_now >= 2:
        full = {"message": "Server at capacity: 2/2 sessions active.", "code": "CAPACITY_REACHED"}
        await socket.send_text(answer("error", {**full, "active_sessions": 2, "max_sessions": 2}))
        await socket.close()
        return
    open_now += 1
    steps = 0
    try:
        while True:
            message = json.loads(await socket.receive_text())
            data = message.get("data", {})
            if message["type"] == "reset":
                told = f"ready {data.pop('seed') > 0} {json.dumps(data, sort_keys=True)}"
                observation = {"metadata": {}, "echoed": told}
                reply = answer("observation", {"observation": observation, "reward": None, "done": False})
            elif message["type"] == "state":
                reply = answer("state", {"episode_id": "", "step_count": steps})
            elif "message" not in data:
                error = {"message": "Invalid message", "code": "VALIDATION_ERROR", "errors": [MISSING]}
                reply = answer("error", error)
            elif data["message"] == "fail":
                reply = answer("error", {"message": "it broke", "code": "EXECUTION_ERROR"})
            elif data["message"] == "die":
                os._exit(3)
            else:
                steps += 1
                observation = {"metadata": {"n": steps}, "echoed": data["message"]}
                reward = len(data["message"]) / 10
                whole = {"observation": observation, "reward": reward, "done": steps == 2, "metadata": {"n": steps}}
                reply = answer("observation", whole)
            await socket.send_text(reply)
    except WebSocketDisconnect:
        pass
    finally:
        open_now -= 1
