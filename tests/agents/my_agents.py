"""Agents as users write them: nothing of hybridrl but, where they want, its scores."""

import contextlib
import os
import signal
import time

import anthropic
import httpx
import openai

from hybridrl.scored import Scored, Unscored


def talks(base_url, api_key, row):
    """Two turns, and a short second conversation."""
    client = openai.OpenAI(base_url=base_url, api_key=api_key)
    messages = list(row["raw_prompt"])
    for question in ("Sure?", None):
        answer = client.chat.completions.create(model="gpt-7", messages=messages, temperature=0, seed=42, max_tokens=12)
        if question is not None:
            messages += [answer.choices[0].message, {"role": "user", "content": question}]
    client.chat.completions.create(model="gpt-7", messages=[{"role": "user", "content": "Note it."}], max_tokens=6)


async def judges(base_url, api_key, row):
    """Reads where to call from its environment, and scores itself."""
    client = anthropic.AsyncAnthropic()
    assert os.environ["OPENAI_BASE_URL"] == base_url
    messages = [message for message in row["raw_prompt"] if message["role"] == "user"]
    answer = await client.messages.create(model="claude-9", messages=messages, max_tokens=8)
    return Scored(float(answer.usage.output_tokens), {"judged": "yes"})


def by_kind(base_url, api_key, row):
    """Does what the row's column says."""
    kind = row["kind"]
    client = openai.OpenAI(base_url=base_url, api_key=api_key, max_retries=0)
    if kind in ("talks", "judges"):
        return {"talks": talks, "judges": judges}[kind](base_url, api_key, row)
    if kind == "silent":
        return None
    if kind == "shrugs":
        client.responses.create(model="m", input="Hello", max_output_tokens=5)
        while os.path.exists(f"/proc/{row['mark']}"):  # the server's
            time.sleep(0.01)
        return 0.0
    answer = client.responses.create(model="m", input="Hello", max_output_tokens=5)
    if kind == "raises":
        raise ValueError("a bug of the agent")
    if kind == "exits":
        os._exit(3)
    if kind == "hangs":
        while True:
            pass
    if kind == "sleeps":
        os.system(f"sleep {row['mark']} &")
        time.sleep(1000)
    if kind == "abstains":
        return Unscored("grading", "cannot tell")
    if kind == "wrong":
        return "well done"
    if kind in ("long", "long_then_killed", "long_then_wrong", "long_then_goes_on"):
        kept = kind.partition("_then_")[2]
        with contextlib.suppress(openai.BadRequestError) if kept else contextlib.nullcontext():
            client.responses.create(model="m", input="b" * 500, previous_response_id=answer.id)
        if kept == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if kept == "wrong":
            return "well done"
        client.responses.create(model="m", input="Hello again", max_output_tokens=5)
        raise ValueError("a bug of the agent")
    return 0.5


def routes(base_url, api_key, row):
    """Two turns, and a request in tokens, whose experts it tells."""
    talk = openai.OpenAI(base_url=base_url, api_key=api_key)
    messages = list(row["raw_prompt"])
    for question in ("Sure?", None):
        answer = talk.chat.completions.create(model="m", messages=messages, max_tokens=6)
        messages += [answer.choices[0].message, {"role": "user", "content": question}]
    root = base_url.partition("/sessions")[0]
    asked = {"token_ids": [5, 6, 7, 8], "sampling_params": {"max_tokens": 5, "ignore_eos": True}}
    headers = {"Authorization": f"Bearer {api_key}"}
    answer = httpx.post(f"{root}/inference/v1/generate", json=asked, headers=headers, timeout=60).json()
    return Scored(0.0, {"told": answer["choices"][0]["routed_experts"]})
