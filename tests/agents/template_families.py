"""Short chat templates with the turns of well-known families, and a model whose vocabulary has all their marks."""

import json
from dataclasses import dataclass
from pathlib import Path

CALLS = "{% for call in m.tool_calls or [] %}BEFORE{{ call.function.arguments | tojson }}AFTER{% endfor %}"
_ROLES = (
    "{%% for m in messages %%}"
    "{%% if m.role == 'tool' %%}%(tool)s"
    "{%% elif m.role == 'assistant' %%}%(assistant)s"
    "{%% else %%}%(user)s{%% endif %%}{%% endfor %%}"
    "{%% if add_generation_prompt %%}%(opening)s{%% endif %%}"
)


def _template(tool: str, assistant: str, user: str, opening: str) -> str:
    shown = "{% if tools %}{{ tools | tojson }}{% endif %}"
    return shown + _ROLES % {"tool": tool, "assistant": assistant, "user": user, "opening": opening}


@dataclass(frozen=True)
class Family:
    """A template, and what it must write behind a turn of the model that ended by itself, for the answer ANSWER."""

    template: str
    end: str
    behind: str


_CHATML_CALLS = CALLS.replace("BEFORE", '<tool_call>\n{"name": "{{ call.function.name }}", "arguments": ').replace(
    "AFTER", "}\n</tool_call>"
)
_CHATML = {
    "assistant": "<|im_start|>assistant\n{{ m.content }}" + _CHATML_CALLS + "<|im_end|>\n",
    "user": "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n",
}
FAMILIES = {
    # the turn separator is not generated, and several answers share a message of the user
    "qwen": Family(
        _template(
            "{% if loop.index0 == 0 or messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user{% endif %}"
            "{{ '\n<tool_response>\n' + m.content + '\n</tool_response>' }}"
            "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>\n{% endif %}",
            opening="<|im_start|>assistant\n",
            **_CHATML,
        ),
        "<|im_end|>",
        "\n<|im_start|>user\n<tool_response>\nANSWER\n</tool_response><|im_end|>\n<|im_start|>assistant\n",
    ),
    # calls are tags, and a system message is written in any case
    "qwen3_coder": Family(
        "{% if messages[0].role != 'system' %}<|im_start|>system\nYou are Qwen.<|im_end|>\n{% endif %}"
        + _template(
            "{% if loop.index0 == 0 or messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user\n{% endif %}"
            "{{ '<tool_response>\n' + m.content + '\n</tool_response>\n' }}"
            "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>\n{% endif %}",
            "<|im_start|>assistant\n{{ m.content }}{% for call in m.tool_calls or [] %}"
            "{{ '\n<tool_call>\n<function=' + call.function.name + '>\n' }}"
            "{% for k, v in call.function.arguments.items() %}"
            "{{ '<parameter=' + k + '>\n' + (v if v is string else v | tojson) + '\n</parameter>\n' }}{% endfor %}"
            "</function>\n</tool_call>{% endfor %}<|im_end|>\n",
            _CHATML["user"],
            "<|im_start|>assistant\n",
        ),
        "<|im_end|>",
        "\n<|im_start|>user\n<tool_response>\nANSWER\n</tool_response>\n<|im_end|>\n<|im_start|>assistant\n",
    ),
    # the opening of a turn begins a thought
    "thinking": Family(
        _template(
            "<|im_start|>user\n<tool_response>\n{{ m.content }}\n</tool_response>\n<|im_end|>\n",
            opening="<|im_start|>assistant\n<think>\n",
            **_CHATML,
        ),
        "<|im_end|>",
        "\n<|im_start|>user\n<tool_response>\nANSWER\n</tool_response>\n<|im_end|>\n<|im_start|>assistant\n<think>\n",
    ),
    # answers are JSON, and only one call is taken
    "llama3": Family(
        _template(
            "<|start_header_id|>ipython<|end_header_id|>\n\n{{ m.content | tojson }}<|eot_id|>",
            "{% if (m.tool_calls or []) | length > 1 %}{{ raise_exception('one call at once') }}{% endif %}"
            "<|start_header_id|>assistant<|end_header_id|>\n\n{{ m.content }}"
            + CALLS.replace("BEFORE", '{"name": "{{ call.function.name }}", "parameters": ').replace("AFTER", "}")
            + "<|eot_id|>",
            "<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n{{ m.content }}<|eot_id|>",
            "<|start_header_id|>assistant<|end_header_id|>\n\n",
        ),
        "<|eot_id|>",
        '<|start_header_id|>ipython<|end_header_id|>\n\n"ANSWER"<|eot_id|>'
        "<|start_header_id|>assistant<|end_header_id|>\n\n",
    ),
    # a turn ends with the mark that opens the next one
    "glm": Family(
        _template(
            "{% if loop.index0 == 0 or messages[loop.index0 - 1].role != 'tool' %}<|observation|>{% endif %}"
            "{{ '\n<tool_response>\n' + m.content + '\n</tool_response>' }}",
            "<|assistant|>\n{{ m.content }}{% for call in m.tool_calls or [] %}<tool_call>{{ call.function.name }}"
            "{% for k, v in call.function.arguments.items() %}<arg_key>{{ k }}</arg_key><arg_value>{{ v }}</arg_value>"
            "{% endfor %}</tool_call>{% endfor %}",
            "<|user|>\n{{ m.content }}",
            "<|assistant|>",
        ),
        "<|observation|>",
        "\n<tool_response>\nANSWER\n</tool_response><|assistant|>",
    ),
    # a call ends with a mark of its own, and answers name the tool
    "gpt-oss": Family(
        _template(
            "<|start|>functions.{{ m.name }} to=assistant<|channel|>commentary<|message|>"
            "{{ m.content | tojson }}<|end|>",
            "{% if m.tool_calls %}<|start|>assistant to=functions.{{ m.tool_calls[0].function.name }}"
            "<|channel|>commentary json<|message|>{{ m.tool_calls[0].function.arguments | tojson }}<|call|>"
            "{% else %}<|start|>assistant<|channel|>final<|message|>{{ m.content }}<|end|>{% endif %}",
            "<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>",
            "<|start|>assistant",
        ),
        "<|call|>",
        '<|start|>functions.echo to=assistant<|channel|>commentary<|message|>"ANSWER"<|end|><|start|>assistant',
    ),
    # arguments are taken as text only, and answers have the id of their call
    "kimi": Family(
        _template(
            "<|im_system|>{{ m.name }}<|im_middle|>## Return of {{ m.tool_call_id }}\n{{ m.content }}<|im_end|>",
            "<|im_assistant|>assistant<|im_middle|>{{ m.content }}{% for call in m.tool_calls or [] %}"
            "{{ '<|tool_call_begin|>' + call.id + '<|tool_call_argument_begin|>' + call.function.arguments }}"
            "<|tool_call_end|>{% endfor %}<|im_end|>",
            "<|im_user|>user<|im_middle|>{{ m.content }}<|im_end|>",
            "<|im_assistant|>assistant<|im_middle|>",
        ),
        "<|im_end|>",
        "<|im_system|>echo<|im_middle|>## Return of call00001\nANSWER<|im_end|><|im_assistant|>assistant<|im_middle|>",
    ),
    # no opening: the model goes on behind the answers
    "deepseek": Family(
        _template(
            "<｜tool▁output▁begin｜>{{ m.content }}<｜tool▁output▁end｜>",
            "{{ m.content }}{% for call in m.tool_calls or [] %}<｜tool▁call▁begin｜>{{ call.function.name }}"
            "<｜tool▁sep｜>{{ call.function.arguments | tojson }}<｜tool▁call▁end｜>{% endfor %}<｜end▁of▁sentence｜>",
            "<｜User｜>{{ m.content }}<｜Assistant｜>",
            "",
        ),
        "<｜end▁of▁sentence｜>",
        "<｜tool▁output▁begin｜>ANSWER<｜tool▁output▁end｜>",
    ),
}
ENDS = ("<|im_end|>", "<|eot_id|>", "<|observation|>", "<|user|>", "<|call|>", "<｜end▁of▁sentence｜>")
#: special tokens that end a turn in a history, and that the model does not end it with
MARKS = ("<|end|>",)

#: templates that cannot be continued -> a word of the error
BROKEN = {
    "drops earlier calls": (
        _template(
            "<|im_start|>tool\n{{ m.content }}<|im_end|>\n",
            "<|im_start|>assistant\n{{ m.content }}{% if loop.index0 >= messages | length - 2 %}"
            + _CHATML_CALLS
            + "{% endif %}<|im_end|>\n",
            _CHATML["user"],
            "<|im_start|>assistant\n",
        ),
        "leaves out a turn",
    ),
    "changes earlier answers": (
        _template(
            "<|im_start|>tool\n{{ m.content if loop.index0 >= messages | length - 1 else '(old)' }}<|im_end|>\n",
            opening="<|im_start|>assistant\n",
            **_CHATML,
        ),
        "not append-only",
    ),
    "counts answers": (
        _template(
            "<|im_start|>tool {{ loop.index }}\n{{ m.content }}<|im_end|>\n",
            opening="<|im_start|>assistant\n",
            **_CHATML,
        ),
        "for the same answer",
    ),
    "no end": (
        _template("[{{ m.content }}]", "({{ m.content }}" + _CHATML_CALLS + ")", "<{{ m.content }}>", "("),
        "no token that ends",
    ),
    "refuses tools": (
        _template("{{ raise_exception('roles must alternate') }}", opening="<|im_start|>assistant\n", **_CHATML),
        "roles must alternate",
    ),
}


def write_model(micro_model: Path, folder: Path) -> Path:
    """The micro model with the ends of all families as tokens, each of them an EOS."""
    from tokenizers import AddedToken
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer, model = AutoTokenizer.from_pretrained(micro_model), AutoModelForCausalLM.from_pretrained(micro_model)
    tokenizer.add_tokens([AddedToken(end, special=True, normalized=False) for end in (*ENDS, *MARKS)])
    model.resize_token_embeddings(len(tokenizer))
    model.generation_config.eos_token_id = tokenizer.convert_tokens_to_ids(list(ENDS))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    assert config["vocab_size"] == len(tokenizer)
    return folder
