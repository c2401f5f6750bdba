"""The tool `python`: Python code of the model, run in a sandbox on this machine or by a server."""

from typing import Any

from hybridrl.agents.session_executor import in_thread
from hybridrl.agents.tools.builtin import register_tool
from hybridrl.agents.tools.tool import BaseTool, ToolResponse
from hybridrl.config.schema.multi_turn import MultiTurnConfig
from hybridrl.errors import RolloutError
from hybridrl.notify import notify
from hybridrl.sandbox import EXPOSURE, Limits, LocalSandbox, Program, RemoteSandbox, Sandbox, SandboxError

_OWN = ("url", "max_concurrent", "allow_unisolated")


@register_tool("python")
class PythonTool(BaseTool):
    """Runs Python code in a sandbox. Each call is a program of its own, whose files are gone at its end.

    Config: the fields of `Limits`; `max_concurrent`, programs that run at once on this machine (one per core; 64 with a
    url); `url`, of a server that speaks SandboxFusion's HTTP API and has its own limits besides `wall_s` and
    `memory_mb`; `allow_unisolated`, to run programs also where the kernel gives no namespaces. The time that a call
    waits for other programs does not count against `multi_turn.tool_timeout_s`. A sandbox that fails ends the session
    without a score.
    """

    config_names = (*Limits.__dataclass_fields__, *_OWN)

    def __init__(self, config: dict[str, Any], tool_schema: Any = None) -> None:
        super().__init__(config, tool_schema)
        limits = {name: value for name, value in config.items() if name not in ("type", *_OWN)}
        try:
            self._limits = Limits(**limits)
        except TypeError:
            setting_names = ", ".join((*Limits.__dataclass_fields__, *_OWN))
            raise RolloutError(f"python: config has {', '.join(limits)}; choose from {setting_names}") from None
        self._sandbox = _sandbox(config, self._limits)
        try:
            reason = self._sandbox.check()
        except SandboxError as error:
            raise RolloutError(f"python: {error}") from error
        if reason:
            notify(
                f"tool python: the kernel gives no namespaces ({reason}), and programs of the model run without "
                f"isolation, as config.allow_unisolated or the environment allows: {EXPOSURE}",
                "warning",
            )

    def check_settings(self, settings: MultiTurnConfig) -> None:
        """Refuse a time limit of programs that the time limit of tool calls does not leave room for.

        Raises:
            RolloutError: it does not.
        """
        if self._limits.wall_s >= settings.tool_timeout_s:
            raise RolloutError(
                f"tool python: config.wall_s={self._limits.wall_s:g} must be below "
                f"actor_rollout_ref.rollout.multi_turn.tool_timeout_s={settings.tool_timeout_s:g}, the limit of a "
                "call; lower wall_s, or raise tool_timeout_s"
            )

    def get_openai_tool_schema(self) -> Any:
        """The description for the model."""
        parameter = {"type": "string", "description": "a program; it prints what you want to see"}
        parameters = {"type": "object", "properties": {"code": parameter}, "required": ["code"]}
        function = {"name": "python", "description": "Run a Python program.", "parameters": parameters}
        return {"type": "function", "function": function}

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, float | None, dict[str, Any]]:
        """Return the program's output, with a note if it was stopped or failed."""
        program = Program(str(parameters["code"]), one_stream=True)
        outcome = await in_thread(lambda: self._sandbox.run(program, self._limits))
        ends = {"time": f"[ended after {self._limits.wall_s:g} s]", "output": "[ended: it printed too much]"}
        note = ends.get(outcome.ended, f"[exit code {outcome.code}]" if outcome.code else "")
        return ToolResponse("\n".join(filter(None, (outcome.output.rstrip("\n"), note)))), None, {"code": outcome.code}


def _sandbox(config: dict[str, Any], limits: Limits) -> Sandbox:
    count, url = config.get("max_concurrent"), config.get("url")
    if count is not None and (not isinstance(count, int) or count < 1):
        raise RolloutError(f"python: config.max_concurrent is {count!r}; give a number of programs")
    if not isinstance(unisolated := config.get("allow_unisolated"), bool | None):
        raise RolloutError(f"python: config.allow_unisolated is {unisolated!r}; give true or false")
    if url is None:
        return LocalSandbox(limits, count, allow_unisolated=unisolated)
    try:
        return RemoteSandbox(str(url), limits, count or 64)
    except SandboxError as error:
        raise RolloutError(f"python: config.url: {error}") from error
