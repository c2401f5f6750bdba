"""Servers made from the configuration: `rollout.server` and `rollout.prometheus`."""

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hybridrl.config import ModelConfig, RolloutConfig
from hybridrl.models.info import config_of, tokenizer_of
from hybridrl.rollout.client import GenerationClient
from hybridrl.rollout.server.app import Served, create_app
from hybridrl.rollout.server.http import OpenAIServer, new_token

ACCESS_FILE = "server.json"


@dataclass(frozen=True)
class Access:
    """Address and key for clients, kept in `server.json` in the run's folder (readable by its owner only)."""

    url: str
    token: str
    model: str

    def write(self, folder: Path, replicas: Sequence[str] = ()) -> Path:
        """Write the file; `replicas` are the addresses of single ones, for clients that choose a replica themselves."""
        urls = [f"http://{address}/v1" for address in replicas]
        path = Path(folder) / ACCESS_FILE
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            known = {"base_url": self.url, "api_key": self.token, "model": self.model, "replicas": urls}
            json.dump(known, file, indent=1)
        return path


def served_model(rollout: RolloutConfig, model: ModelConfig, heeds_seeds: bool = True) -> Served:
    """The model as the API describes it, with its tokenizer."""
    text = config_of(model).get_text_config()
    tokenizer = tokenizer_of(model)
    return Served(
        name=rollout.prometheus.served_model_name or model.path,
        tokenizer=tokenizer,
        max_model_len=rollout.max_model_len or rollout.prompt_length + rollout.response_length,
        vocab_size=getattr(text, "vocab_size", None) or len(tokenizer),
        heeds_seeds=heeds_seeds,
    )


def make_server(
    rollout: RolloutConfig,
    model: ModelConfig,
    client: GenerationClient,
    *,
    token: str | None = None,
    host: str | None = "",
    port: int | None = None,
    heeds_seeds: bool = True,
) -> tuple[OpenAIServer, Access]:
    """A server that has its port and answers once it is started (`start` or `start_thread`).

    Args:
        client: over all replicas, or of one.
        token: the run's; None: by `rollout.server.api_key_env`.
        host: None: the node's address; "": `rollout.server.host`.
        port: None: `rollout.server.port`.
        heeds_seeds: the engine samples with a request's own seed.

    Raises:
        RolloutError: the port is taken, the host is not this machine's, the token's variable is not set.
    """
    served = served_model(rollout, model, heeds_seeds)
    token = token or new_token(rollout.server.api_key_env)
    app = create_app(client, served, token)
    server = OpenAIServer(
        app, rollout.server.host if host == "" else host, rollout.server.port if port is None else port
    )
    return server, Access(server.url, token, served.name)
