"""Readers of the mappings that a model, its chat template and its image processor take."""

from collections.abc import Iterator, Mapping
from typing import Any

from hybridrl.config.mappings import Entries, reads_mapping
from hybridrl.errors import ModelError

#: the settings of the model whose template and processor the data get
_POLICY = "actor_rollout_ref.model|model"
#: what a rendering passes itself, or what changes no text
_OF_RENDERING = {"messages", "add_generation_prompt", "continue_final_message"}


@reads_mapping("model-fields")
def check_model_config(entries: Entries) -> Iterator[str]:
    """Check `model.override_config` against the fields that the model's config.json and its class have."""
    from hybridrl.models.model_config import load_model_config

    model = entries.near(".path"), entries.near(".hf_config_path"), entries.near(".trust_remote_code")
    path, own, trusted = model
    if not entries.values.keys() - {"attn_implementation"} or not path:
        return
    try:
        load_model_config(own or path, trusted)
    except ModelError:
        return  # it is reported where the model is loaded

    def fault(values: Mapping[str, Any]) -> str | None:
        try:
            load_model_config(own or path, trusted, override=values)
        except ModelError as error:
            return str(error).replace("model.override_config", entries.key, 1)
        return None

    together = fault(entries.values)
    if together is not None:  # each for itself as well, so that every fault is named
        single = [fault({name: value}) for name, value in entries.values.items()]
        yield from [each for each in single if each is not None] or [together]


@reads_mapping("template-variables")
def check_template(entries: Entries) -> Iterator[str]:
    """Check `data.apply_chat_template_kwargs` against the variables of the policy's chat template."""
    if entries.near(".custom_cls.path") is not None:
        return  # such a class may pass them to something else
    yield from unread_variables(entries, entries.near(_POLICY))


@reads_mapping("judge-requests")
def check_judge_requests(entries: Entries) -> Iterator[str]:
    """Check the template's variables of a judge that the run serves; what an endpoint takes is not known."""
    kwargs = entries.values.get("chat_template_kwargs")
    if entries.near(".enable") and isinstance(kwargs, Mapping) and kwargs:
        own = Entries(f"{entries.key}.chat_template_kwargs", kwargs, entries.lookup)
        yield from unread_variables(own, entries.near("..model"))


def unread_variables(entries: Entries, model: Any) -> Iterator[str]:
    """Yield a sentence for each entry that the chat template of a model does not read.

    Args:
        model: a `ModelConfig`.
    """
    from hybridrl.models.info import tokenizer_of

    if "chat_template" in entries.values or not model.path:
        return
    try:
        template = tokenizer_of(model).chat_template
    except ModelError:
        return  # it is reported where the tokenizer is loaded
    if not template:
        return
    variables: set[str] = set()
    for text in template.values() if isinstance(template, Mapping) else (template,):
        variables |= _variables_of(str(text))
    yield from entries.unknown(variables - _OF_RENDERING, f"the chat template of {model.tokenizer_path or model.path}")


def _variables_of(template: str) -> set[str]:
    """The names that a template reads and does not define."""
    from jinja2 import TemplateError, meta
    from transformers.utils.chat_template_utils import _compile_jinja_template

    try:
        environment = _compile_jinja_template(template).environment
        return set(meta.find_undeclared_variables(environment.parse(template)))
    except TemplateError:
        return set()  # rendering reports it


@reads_mapping("processor-fields")
def check_processor(entries: Entries) -> Iterator[str]:
    """Check `data.mm_processor_kwargs` against the model's image processor."""
    from hybridrl.models.vision import processor_of

    model = entries.near(_POLICY)
    if not model.path:
        return
    try:
        processor_of(model, entries.values)
    except ModelError as error:
        if entries.key in str(error):  # others are reported where the processor is made
            yield str(error)
