"""Access to the paths of the HTTP server, and the format of its errors; the limits are those of every server."""

from collections.abc import Callable, Mapping
from typing import Any

from starlette.exceptions import HTTPException

from hybridrl.serve.schema import ApiError
from hybridrl.utils.http_server import App, HttpRefusal, Scope, TokenGuard

BODY_MB, BODY_MB_WITH_IMAGES = 8, 64
_BODY_KEY = "actor_rollout_ref.rollout.server.max_body_mb"
_OPEN_PATHS = ("/health", "/metrics")
_SESSIONS = "/sessions/"
_GENERATING = ("/v1/", "/inference/v1/")
_TELLING = ("/is_paused", "/weight_info")  # of the state that answers of a session depend on
_ANTHROPIC_PATHS = ("/v1/messages", "/v1/messages/count_tokens")
_ANTHROPIC_TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
}


def body_of_error(path: str, error: ApiError) -> dict[str, Any]:
    """An error in the format of the API that a path belongs to."""
    body = error.body()
    if not path.endswith(_ANTHROPIC_PATHS):
        return body
    kind = _ANTHROPIC_TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": body["error"]["message"]}, "request_id": None}


def body_of_refusal(path: str, error: HttpRefusal) -> dict[str, Any]:
    """A request that is not served, as an error of the API."""
    return body_of_error(path, ApiError(error.status, str(error), code=error.code))


class Guard(TokenGuard):
    """The guard of the run's server, where the id of a session is a key, too.

    Args:
        app: the application.
        token: the key that every path except `/health` and `/metrics` requires; None serves everybody.
        is_session: whether a text is the id of an open session. The id is a key too, for what generates in it.
        max_body_mb: longer bodies are refused.
    """

    def __init__(
        self,
        app: App,
        token: str | None,
        is_session: Callable[[str], bool] = lambda id: False,
        max_body_mb: int = BODY_MB,
    ) -> None:
        super().__init__(app, token, max_body_mb * 2**20, _BODY_KEY, _OPEN_PATHS, body_of_refusal)
        self._is_session = is_session

    def checked(self, scope: Scope, headers: Mapping[bytes, bytes]) -> tuple[Scope, bool]:
        """The scope with the session that the request belongs to, and whether the client has sent a key."""
        path = scope["path"]
        key = headers.get(b"x-api-key") or headers.get(b"authorization", b"").removeprefix(b"Bearer ").strip()
        session, owner = self._named_session(path, key.decode("latin-1")), self.is_owner(key)
        if session is None and path.startswith(_SESSIONS):
            id = path.removeprefix(_SESSIONS).partition("/")[0]
            if not self._is_session(id):
                raise HttpRefusal(404, f"{path}: there is no such session, or it was closed", "session_not_found")
            session = id  # who knows the id may read and close the session
        if session is None and not owner and path not in _OPEN_PATHS:
            raise HttpRefusal(
                401,
                "wrong or missing token: send `Authorization: Bearer TOKEN` with this run's token, or the id of an "
                "open session",
                "invalid_api_key",
            )
        if session is not None:
            scope = {**scope, "state": {**scope.get("state", {}), "session": session}}
            _, separator, rest = path.partition(f"{_SESSIONS}{session}")
            if separator and rest.startswith(_GENERATING):  # one route serves calls inside and outside of sessions
                scope |= {"path": rest, "raw_path": rest.encode()}
        return scope, owner or session is not None

    def too_long(self, message: str) -> Exception:
        """FastAPI passes this one on."""
        return HTTPException(413, message)

    def _named_session(self, path: str, key: str) -> str | None:
        """The session whose id is the key of a request that generates or tells."""
        return key if (path.startswith(_GENERATING) or path in _TELLING) and self._is_session(key) else None
