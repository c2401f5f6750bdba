"""Tools of MCP servers, through the package `mcp` (extra `mcp`)."""

import asyncio
import base64
import contextlib
import json
import os
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from hybridrl.agents.tools.builtin import register_tool
from hybridrl.agents.tools.tool import BaseTool, ToolResponse
from hybridrl.chat.session_images import opened
from hybridrl.errors import RolloutError
from hybridrl.scored import Reason, UnscoredError
from hybridrl.utils import clock
from hybridrl.utils.movement import Movement, StartWatch, family

_LOOK_S = 0.5
#: entries of a server that say what the others do
_DESCRIPTIONS = ("type", "transport", "name", "description")


@register_tool("mcp")
class McpTool(BaseTool):
    """A tool of an MCP server.

    One entry of `multi_turn.tool_config_path` stands for all tools of its servers:

        tools:
          - class_name: mcp
            config:
              mcp_servers_config_path: servers.json   # {"mcpServers": {NAME: {"command": ..., "args": [...]}}}
              tool_selected_list: [add]               # null: all
              start_timeout: 60                       # null: a server has time as long as something moves

    A server is a command, with `args`, `env` and `cwd`, or a `url`. There is one connection to it, which all sessions
    share. Where it ends, the sessions that wait for an answer have no score, and the next call opens another one.
    """

    config_names = ("mcp_servers_config_path", "tool_selected_list", "start_timeout")

    def __init__(self, config: dict[str, Any], tool_schema: Any, server: "_Server") -> None:
        super().__init__(config, tool_schema)
        self._server = server

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> list[BaseTool]:
        """Connect to the servers, and return their tools.

        Raises:
            RolloutError: the package is missing, a server does not start, or a selected tool is none of theirs.
        """
        try:
            import mcp  # noqa: F401
        except ImportError as error:
            message = "tools of MCP servers need the package mcp: bash scripts/install.sh auto mcp"
            raise RolloutError(message) from error
        selection, selected_tools = config.get("tool_selected_list"), list[BaseTool]()
        try:
            for name, entry in _servers(config).items():
                limit = config.get("start_timeout")
                server = _Server(name, entry, None if limit is None else float(limit))
                listed = server.tools()
                tools = [cls(config, schema, server) for schema in listed if _is_selected(schema, selection)]
                if not tools:
                    server.close()
                selected_tools += tools
            names = [tool.name for tool in selected_tools]
            if missing := [name for name in selection or () if name not in names]:
                raise RolloutError(f"tool_selected_list names {', '.join(missing)}, which no server has")
        except BaseException:
            for tool in selected_tools:
                tool.close()
            raise
        return selected_tools

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, float | None, dict[str, Any]]:
        """Return the server's answer: text, and images if the policy reads them.

        Raises:
            UnscoredError: the connection has ended, or cannot be opened again.
        """
        parts = await self._server.call(self.name, parameters)
        images = [part for part in parts if part.type == "image" and self.model_reads_images]
        text = "\n".join(_text_of(part) for part in parts if part not in images)
        return ToolResponse(text, [opened(base64.b64decode(part.data)) for part in images]), None, {}

    def close(self) -> None:
        """End the connection; the other tools of the server end with it."""
        self._server.close()


class _ConnectionEndedError(Exception):
    """The server does not answer any more."""


class _Server:
    """A server, and the connection to it; another one is opened after it has ended.

    Args:
        name: for messages.
        entry: of `mcpServers`.
        limit: seconds until it must have listed its tools; None: it has time as long as something moves.
    """

    def __init__(self, name: str, entry: Mapping[str, Any], limit: float | None) -> None:
        self._name = name
        self._open = partial(_Connection, name, entry, limit)
        self._connection = self._open()
        self._lock = threading.Lock()
        self._closed = False

    def tools(self) -> list[dict[str, Any]]:
        """The descriptions of its tools in OpenAI's format."""
        return self._connection.tools()

    async def call(self, name: str, parameters: dict[str, Any]) -> list[Any]:
        """The parts of a call's result; an error of the tool is a RuntimeError.

        A call is sent once: the server may have done what it was asked for before the connection ended.

        Raises:
            UnscoredError: the connection has ended, or cannot be opened again.
        """
        try:
            with clock.stopped():
                connection = await asyncio.to_thread(self._alive)
            return await asyncio.wrap_future(connection.call(name, parameters))
        except (_ConnectionEndedError, RolloutError) as error:
            raise UnscoredError(Reason.INFRA, f"MCP server {self._name}: {error}") from error

    def _alive(self) -> "_Connection":
        with self._lock:
            if self._closed:
                raise RuntimeError(f"the connection to the MCP server {self._name} was closed")
            if self._connection.has_ended:
                self._connection.close()
                self._connection = self._open()
            return self._connection

    def close(self) -> None:
        """End the connection, and a server that was started for it."""
        with self._lock:
            self._closed = True
            self._connection.close()


class _Connection:
    """A connection, kept by an event loop in a thread of its own; see `_Server`."""

    def __init__(self, name: str, entry: Mapping[str, Any], limit: float | None) -> None:
        self._name, self._entry, self._limit = name, entry, limit
        self._before = {process.pid for process in psutil.Process().children()}
        self._loop = asyncio.new_event_loop()
        self._ends = asyncio.Event()
        self._ready: Future[Any] = Future()  # of this thread: the loop ends with a server that does not start
        self._thread = threading.Thread(target=self._run, name=f"mcp {name}", daemon=True)
        self.has_ended = False
        self._thread.start()
        try:
            self._client = self._patient(self._ready)
        except Exception as error:
            self.close()
            raise RolloutError(f"MCP server {name}: {_reason(error)}") from error

    def _patient(self, answer: Future[Any]) -> Any:
        """Wait for an answer of the server that starts, as long as something moves.

        Raises:
            RolloutError: nobody should wait any longer.
        """
        movement = Movement(self._processes, io=True)
        watch = StartWatch(f"the MCP server {self._name}", movement, limit_s=self._limit, users=True)
        while True:
            try:
                return answer.result(_LOOK_S)
            except TimeoutError:
                if answer.done():
                    raise  # it is the server's own
                if (why := watch.why_given_up()) is not None:
                    raise RolloutError(f"it did not answer in {watch.waited_s:.0f} s: {why}") from None

    def _processes(self) -> list[psutil.Process]:
        """The processes of a server that was started for this connection; empty for one at a URL."""
        words = [Path(str(self._entry.get("command"))).name, *map(str, self._entry.get("args", ()))]
        started = []
        for child in psutil.Process().children():
            with contextlib.suppress(psutil.Error):
                if child.pid not in self._before and set(words) <= {*child.cmdline(), Path(child.cmdline()[0]).name}:
                    started += family(child.pid)
        return started

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._serve())
        finally:
            self._loop.close()

    async def _serve(self) -> None:
        """Hold the connection: it must be opened and closed by one task."""
        async with AsyncExitStack() as stack:
            try:
                from mcp import Client, StdioServerParameters

                if "url" in self._entry:
                    target: Any = self._entry["url"]
                else:
                    target = StdioServerParameters(
                        command=self._entry["command"],
                        args=list(self._entry.get("args", ())),
                        env={**os.environ, **self._entry["env"]} if self._entry.get("env") else None,
                        cwd=self._entry.get("cwd"),
                    )
                self._ready.set_result(await stack.enter_async_context(Client(target)))
            except Exception as error:
                self._ready.set_exception(error)
                return
            await self._ends.wait()

    def tools(self) -> list[dict[str, Any]]:
        """The descriptions of its tools in OpenAI's format."""

        async def pages() -> list[Any]:
            listed_tools, cursor = [], None
            while True:
                page = await self._client.list_tools(cursor=cursor)
                listed_tools += page.tools
                cursor = page.next_cursor
                if not cursor:
                    return listed_tools

        try:
            listed = self._patient(asyncio.run_coroutine_threadsafe(pages(), self._loop))
        except Exception as error:
            self.close()
            raise RolloutError(f"MCP server {self._name}: it does not list its tools: {_reason(error)}") from error
        return [
            {
                "type": "function",
                "function": {
                    "name": tool.name,
                    "description": tool.description or "",
                    "parameters": dict(tool.input_schema or {"type": "object", "properties": {}}),
                },
            }
            for tool in listed
        ]

    def call(self, name: str, parameters: dict[str, Any]) -> Future[list[Any]]:
        """A future of the parts of a call's result.

        Its exceptions: `RuntimeError`, an error of the tool, or of the protocol, such as wrong arguments;
        `_ConnectionEndedError`, everything else.
        """
        from mcp import MCPError
        from mcp.types import CONNECTION_CLOSED

        async def ask() -> list[Any]:
            try:
                result = await self._client.call_tool(name, parameters)
            except Exception as error:
                if isinstance(error, MCPError) and error.code != CONNECTION_CLOSED:
                    raise RuntimeError(_reason(error)) from error
                self.has_ended = True
                raise _ConnectionEndedError(f"the connection has ended: {_reason(error)}") from error
            if result.is_error:
                raise RuntimeError("\n".join(map(_text_of, result.content)) or "the tool failed")
            return list(result.content)

        try:
            return asyncio.run_coroutine_threadsafe(ask(), self._loop)
        except RuntimeError as error:  # the loop is closed
            self.has_ended = True
            raise _ConnectionEndedError("the connection has ended") from error

    def close(self) -> None:
        """End the connection, and a server that was started for it."""
        if self._thread.is_alive() and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._ends.set)
            self._thread.join(10.0)


def _servers(config: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    path = config.get("mcp_servers_config_path")
    file = Path(str(path)).expanduser()
    if path is None or not file.is_file():
        raise RolloutError(f"mcp_servers_config_path={path}: there is no such file")
    try:
        servers = json.loads(file.read_text(encoding="utf-8"))["mcpServers"]
    except (ValueError, KeyError, TypeError) as error:
        raise RolloutError(f"mcp_servers_config_path={path}: it is not JSON with 'mcpServers': {error!r}") from error
    for name, entry in servers.items():
        if not isinstance(entry, Mapping) or not ({"command", "url"} & entry.keys()):
            raise RolloutError(f"mcp_servers_config_path={path}: server {name} has neither 'command' nor 'url'")
        entries = ("url",) if "url" in entry else ("command", "args", "env", "cwd")
        if unread := sorted(set(entry) - {*entries, *_DESCRIPTIONS}):
            raise RolloutError(
                f"mcp_servers_config_path={path}: server {name} has {', '.join(unread)}, which nothing would read; an "
                f"entry with {entries[0]!r} has {', '.join(entries)}"
            )
    return dict(servers)


def _is_selected(schema: Mapping[str, Any], selection: Sequence[str] | None) -> bool:
    return selection is None or schema["function"]["name"] in selection


def _text_of(part: Any) -> str:
    """A part of a result as text; of one that the model cannot read, that it is left out."""
    text = getattr(part, "text", None)
    return f"({part.type} left out)" if text is None else str(text)


def _reason(error: BaseException) -> str:
    """The first error of a group that says something."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    if isinstance(error, RolloutError):
        return str(error)
    return f"{type(error).__name__}: {error}"
