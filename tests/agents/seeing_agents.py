"""Agents of images as users write them, with the vendors' clients."""

import base64
import io

import anthropic
import openai
from vision_tools import picture

SHOWN, OTHER = (24, 16), 77  # size of the image that a tool shows, and its seed


def url_of(image, kind="PNG"):
    file = io.BytesIO()
    image.save(file, kind, lossless=True)  # of WEBP; other formats do not read it
    return f"data:image/{kind.lower()};base64,{base64.b64encode(file.getvalue()).decode()}"


def shown():
    """What a tool of the agent shows."""
    return url_of(picture(SHOWN, OTHER))


def block_of(url):
    """Anthropic's block of a data URL."""
    head, _, data = url.partition(",")
    kind = head.removeprefix("data:").partition(";")[0]
    return {"type": "image", "source": {"type": "base64", "media_type": kind, "data": data}}


def converted(messages, text, image):
    """Chat messages in another API's parts."""
    parts = {"text": lambda part: text(part["text"]), "image_url": lambda part: image(part["image_url"]["url"])}
    return [
        one
        if isinstance(one["content"], str)
        else one | {"content": [parts[part["type"]](part) for part in one["content"]]}
        for one in messages
    ]


def chat(base_url, api_key, row):
    """A turn, a tool's answer with an image, and the same conversation with another first image."""
    client = openai.OpenAI(base_url=base_url, api_key=api_key, max_retries=0)
    messages = list(row["raw_prompt"])
    answer = client.chat.completions.create(model="m", messages=messages, max_tokens=4)
    result = [{"type": "text", "text": "seen"}, {"type": "image_url", "image_url": {"url": shown(), "detail": "high"}}]
    messages += [answer.choices[0].message, {"role": "tool", "tool_call_id": "a", "content": result}]
    client.chat.completions.create(model="m", messages=messages, max_tokens=4)
    first = messages[0]["content"]
    if not isinstance(first, str):  # equal text, equal number of tokens, another image
        place = next(number for number, part in enumerate(first) if part["type"] == "image_url")
        image = {"type": "image_url", "image_url": {"url": url_of(picture((16, 16), 99))}}
        messages[0] = messages[0] | {"content": [*first[:place], image, *first[place + 1 :]]}
        client.chat.completions.create(model="m", messages=messages, max_tokens=4)


def responses(base_url, api_key, row):
    client = openai.OpenAI(base_url=base_url, api_key=api_key, max_retries=0)
    text, image = (
        (lambda one: {"type": "input_text", "text": one}),
        (lambda url: {"type": "input_image", "image_url": url}),
    )
    given = converted(row["raw_prompt"], text, image)
    first = client.responses.create(model="m", input=given, max_output_tokens=4)
    result = [text("seen"), image(shown())]
    output = {"type": "function_call_output", "call_id": "a", "output": result}
    client.responses.create(model="m", input=[output], previous_response_id=first.id, max_output_tokens=4)


def messages(base_url, api_key, row):
    client = anthropic.Anthropic(api_key=api_key, max_retries=0)
    text = lambda one: {"type": "text", "text": one}  # noqa: E731
    given = converted(row["raw_prompt"], text, block_of)
    first = client.messages.create(model="m", messages=given, max_tokens=4)
    result = {"type": "tool_result", "tool_use_id": "a", "content": [text("seen"), block_of(shown())]}
    given += [{"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
    client.messages.create(model="m", messages=given, max_tokens=4)


def by_kind(base_url, api_key, row):
    assert "multi_modal_inputs" not in row and "image_files" not in row
    {"chat": chat, "responses": responses, "messages": messages}[row["kind"]](base_url, api_key, row)
    return 0.5
