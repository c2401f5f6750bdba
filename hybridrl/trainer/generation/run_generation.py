"""The generation program, from the configuration to the output file."""

import contextlib
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

from hybridrl.config import GenerationConfig, as_dict, validate
from hybridrl.data.data_files import fingerprints
from hybridrl.models.info import check_files, checked_identity, tokenizer_of
from hybridrl.notify import notify
from hybridrl.registry import import_external_lib, is_endpoint
from hybridrl.single_controller.ray import ResourcePoolManager
from hybridrl.trainer.experiment import contents_of
from hybridrl.trainer.generation.generation_report import Report
from hybridrl.trainer.generation.output_file import OutputFile, parts_folder
from hybridrl.trainer.generation.processes import ROLE, Endings, Rollout, start_processes
from hybridrl.trainer.generation.responders import ClusterResponder, EndpointResponder, Responder
from hybridrl.trainer.startup import USES_GPU, workers_starting

_OVERLAP = 2  # parts in progress with an engine: at the end of a part only a few long responses are left


def run_generation(config: GenerationConfig) -> None:
    """Generate the output that `config` describes, or the parts of it that are missing.

    Raises:
        UserError: a setting, file or endpoint cannot work. Parts that were written are kept.
    """
    validate(config)
    import_external_lib(config.actor_rollout_ref.model.external_lib)
    if is_endpoint(config.actor_rollout_ref.rollout.name):
        _through_endpoint(config)
    else:
        _in_cluster(config)


def _through_endpoint(config: GenerationConfig) -> None:
    responder = EndpointResponder(config)
    with contextlib.closing(responder.endpoint):
        output = _output(config, responder, {"endpoint": responder.endpoint.model})
        if not output.is_complete:
            _generate(config, responder, output)


def _in_cluster(config: GenerationConfig) -> None:
    placement, device = config.placement, config.trainer.device
    pool = placement.roles[ROLE]
    manager = ResourcePoolManager({pool: list(placement.pools[pool])}, mapping={ROLE: pool}, use_gpu=USES_GPU[device])

    logs = parts_folder(config.data.output_path) / "logs"

    def spawn() -> tuple[str, Callable[[], Rollout]]:
        return start_processes(config, manager, logs)

    with workers_starting(config.ray_kwargs, manager, device, spawn) as started:
        tokenizer = tokenizer_of(config.actor_rollout_ref.model)
        identity = checked_identity(config.actor_rollout_ref.model, tokenizer)
        check_files(config.actor_rollout_ref.model)
        responder = ClusterResponder.of(config, tokenizer, Endings(config.actor_rollout_ref))
        engine, load = started()
        output = _output(config, responder, {"engine": engine, "model": identity})
        if output.is_complete:
            return
        with contextlib.closing(load()) as rollout:
            responder.generate, responder.in_flight = rollout.generate, 1 if rollout.in_place else _OVERLAP
            _generate(config, responder, output)


def _output(config: GenerationConfig, responder: Responder, made_by: dict[str, Any]) -> OutputFile:
    data = config.data
    settings = made_by | output_settings(config)
    path = Path(data.output_path).expanduser()
    output = OutputFile(
        path, responder.rows, data.batch_size, data.response_key, data.log_probs, settings, overwrite=data.overwrite
    )
    if output.is_complete:
        notify(f"{path} is there already, made with these settings: nothing to do")
    return output


def output_settings(config: GenerationConfig) -> dict[str, Any]:
    """Return the settings that the responses and the parts depend on, without those that say where to compute them."""
    data, rollout, model = as_dict(config.data), config.actor_rollout_ref.rollout, config.actor_rollout_ref.model
    del data["path"], data["output_path"], data["overwrite"], data["filter_overlong_prompts_workers"]
    names = ("do_sample", "temperature", "top_k", "top_p", "ignore_eos", "stop", "seed", "dtype")
    openai = {"base_url": rollout.openai.base_url, "extra_body": rollout.openai.extra_body}
    return {
        "files": fingerprints(config.data.path),
        **{f"data.{name}": value for name, value in data.items()},
        **{f"rollout.{name}": rollout[name] for name in names},
        **({} if Path(model.path).expanduser().is_dir() else {"model.path": model.path}),
        "model.custom_chat_template": model.custom_chat_template,
        "model.override_config": model.override_config,
        **({"rollout.openai": openai} if is_endpoint(rollout.name) else {}),
        **{f"content of {key}": content for key, content in contents_of(config).items()},
    }


def _generate(config: GenerationConfig, responder: Responder, output: OutputFile) -> None:
    """Generate every missing part, then join the parts."""
    missing = output.missing()
    with Report(output, len(missing), config.data.response_key, config.trainer.progress_bar) as report:
        for number, responses in _answered(responder, output, missing):
            output.write(number, responses)
            report.wrote(number, responses)
        output.join()
        report.finish()


def _answered(responder: Responder, output: OutputFile, numbers: list[int]) -> Iterator[tuple[int, Any]]:
    """Yield the responses of each part as it completes. At most `in_flight` parts are in progress."""
    if responder.in_flight == 1:
        for number in numbers:
            yield number, responder.respond(output.rows_of(number))
        return
    remaining = iter(numbers)
    running: dict[Future[Any], int] = {}
    with _threads(responder.in_flight) as threads:

        def begin() -> None:
            number = next(remaining, None)
            if number is not None:
                running[threads.submit(responder.respond, output.rows_of(number))] = number

        for _ in range(responder.in_flight):
            begin()
        while running:
            done, _ = wait(running, return_when=FIRST_COMPLETED)
            for future in sorted(done, key=lambda ended: running[ended]):
                number = running.pop(future)
                begin()
                yield number, future.result()


@contextlib.contextmanager
def _threads(count: int) -> Iterator[ThreadPoolExecutor]:
    """Provide threads that an error in one part does not wait for. Their pending calls end with the responder."""
    threads = ThreadPoolExecutor(count, thread_name_prefix="part")
    try:
        yield threads
    finally:
        threads.shutdown(wait=False, cancel_futures=True)
