"""Servers made from the configuration: `rollout.server` and `rollout.prometheus`."""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hybridrl.chat.parsers.tool_parser import tool_parser_of
from hybridrl.chat.session_images import ImageReader
from hybridrl.chat.turns import Turns
from hybridrl.config import ModelConfig, RolloutConfig
from hybridrl.models.info import eos_token_ids, tokenizer_of
from hybridrl.models.model_config import config_of
from hybridrl.models.vision import ImageProcessor, is_vision_model
from hybridrl.registry import INFERENCE_ENGINES, import_external_lib
from hybridrl.rollout.client import GenerationClient
from hybridrl.serve.app import Served
from hybridrl.serve.http import Listener, new_token
from hybridrl.serve.process import ServerProcess, ServerSetup
from hybridrl.utils.files import replacing

ACCESS_FILE = "server.json"


@dataclass(frozen=True)
class Access:
    """Address and key for clients, kept in `server.json` in the run's folder (readable by its owner only)."""

    url: str
    token: str
    model: str

    def write(self, folder: Path) -> Path:
        """Write the file in place of whatever has its name; a link is replaced, not followed."""
        path = Path(folder) / ACCESS_FILE
        content = {"base_url": self.url, "api_key": self.token, "model": self.model}
        with replacing(path) as temporary:
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
            with os.fdopen(os.open(temporary, flags, 0o600), "w", encoding="utf-8") as file:
                json.dump(content, file, indent=1)
        return path

    def remove(self, folder: Path) -> None:
        """Remove the file, unless another run has replaced it."""
        path = Path(folder) / ACCESS_FILE
        try:
            if not path.is_symlink() and json.loads(path.read_text(encoding="utf-8")).get("base_url") == self.url:
                path.unlink()
        except (OSError, ValueError, AttributeError):  # it is gone, or no longer ours
            return


def served_name(rollout: RolloutConfig, model: ModelConfig) -> str:
    """The name of the model for clients."""
    return rollout.prometheus.served_model_name or model.path


def served_model(setup: ServerSetup) -> Served:
    """The model as the API describes it, with its tokenizer, its chat template and the parser of its tool calls."""
    rollout, model = setup.rollout, setup.model
    import_external_lib(model.external_lib)  # it may register a parser
    text = config_of(model).get_text_config()
    tokenizer = tokenizer_of(model)
    ends = eos_token_ids(model.path, config_of(model), tokenizer)
    settings, images = rollout.multi_turn, None
    if is_vision_model(config_of(model)):
        images = ImageReader(ImageProcessor(model.path, config_of(model), setup.image_kwargs), rollout.limit_images)
    processor = None if images is None else images.processor
    return Served(
        name=served_name(rollout, model),
        tokenizer=tokenizer,
        max_model_len=rollout.max_model_len or rollout.prompt_length + rollout.response_length,
        vocab_size=getattr(text, "vocab_size", None) or len(tokenizer),
        heeds_seeds=setup.heeds_seeds,
        turns=Turns(tokenizer, ends, setup.template_kwargs, settings.tokenization_sanity_check_mode, processor),
        parser=tool_parser_of(settings.format, tokenizer),
        eos_token_ids=ends,
        constrains=INFERENCE_ENGINES.knows(rollout.name) and INFERENCE_ENGINES.metadata(rollout.name).constrains,
        images=images,
        records_routing=setup.records_routing,
    )


def make_server(
    rollout: RolloutConfig,
    model: ModelConfig,
    client: GenerationClient,
    *,
    heeds_seeds: bool = True,
    log_file: Path | None = None,
    template_kwargs: Mapping[str, Any] | None = None,
    image_kwargs: Mapping[str, Any] | None = None,
    records_routing: bool = False,
) -> tuple[ServerProcess, Access]:
    """A server that has its port; it runs once it is started, in a process of its own.

    Args:
        rollout: its group `server` has host, port, limits and the token's variable.
        model: gives the tokenizer and the name.
        client: over all replicas.
        heeds_seeds: the engine samples with a request's own seed.
        log_file: where the process writes.
        template_kwargs: further variables of the chat template.
        image_kwargs: settings of the model's image processor.
        records_routing: the engine returns the experts of tokens.

    Raises:
        RolloutError: the port is taken, the host is not this machine's, the token's variable is not set.
    """
    token = new_token(rollout.server.api_key_env)
    listener = Listener(rollout.server.host, rollout.server.port)
    setup = ServerSetup(
        rollout, model, token, heeds_seeds, dict(template_kwargs or {}), dict(image_kwargs or {}), records_routing
    )
    server = ServerProcess(client, setup, listener, log_file)
    return server, Access(listener.url, token, served_name(rollout, model))
