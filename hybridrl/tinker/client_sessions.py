"""Sessions of the training server's clients: their training runs, in order, and what they sample from."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from hybridrl.engine.fsdp.adapter_bank import AdapterShape
from hybridrl.tinker.backend import SavedWeights
from hybridrl.tinker.pending_requests import PendingRequest, RequestQueue
from hybridrl.tinker.wire import RequestError

_OLD_IDS = 1024  # requests of a run that are known if their client sends them again


@dataclass
class AdapterRun:
    """A training run: one adapter.

    Attributes:
        id: its name, for clients and workers.
        session: the session it belongs to.
        shape: of the adapter; None until it was created or loaded.
        next_seq: number of the request that is computed next; those after it wait for it.
        saves: number of adapters that were saved for sampling without a name.
    """

    id: str
    session: str
    shape: AdapterShape | None = None
    next_seq: int = 1
    saves: int = 0
    user_metadata: dict[str, Any] | None = None
    _waiting: dict[int, PendingRequest] = field(default_factory=dict)
    _by_seq: dict[int, PendingRequest] = field(default_factory=dict)

    def sent_before(self, seq: int) -> PendingRequest | None:
        """Return the request of this number, if the client sends it again because its answer was lost."""
        return self._by_seq.get(seq)

    def submit(self, seq: int, request: PendingRequest, queue: RequestQueue) -> None:
        """Submit a request once all with smaller numbers were."""
        self._by_seq[seq] = self._waiting[seq] = request
        while self.next_seq in self._waiting:
            queue.submit(self._waiting.pop(self.next_seq))
            self._by_seq.pop(self.next_seq - _OLD_IDS, None)
            self.next_seq += 1


@dataclass
class SamplingSource:
    """The base or an adapter, which a client samples from.

    Attributes:
        id: its name.
        session: the session it belongs to.
        weights: None: the base.
        path: of the checkpoint; None: the base, or an adapter without a name.
        by_seq: requests that may be sent again, by their number.
        clients: how many clients use it.
    """

    id: str
    session: str
    weights: SavedWeights | None
    path: str | None = None
    by_seq: dict[int, PendingRequest] = field(default_factory=dict)
    clients: int = 1

    def remember(self, seq: int, request: PendingRequest) -> None:
        """Know the request again if it is sent again."""
        self.by_seq[seq] = request
        if len(self.by_seq) > _OLD_IDS:
            del self.by_seq[next(iter(self.by_seq))]


@dataclass
class Session:
    """A session of a client; `heard_at` is when it was last heard of, by the monotonic clock."""

    id: str
    user_metadata: dict[str, Any] | None
    display_name: str | None
    heard_at: float = field(default_factory=time.monotonic)
    runs: dict[str, AdapterRun] = field(default_factory=dict)
    samplers: dict[str, SamplingSource] = field(default_factory=dict)


class ClientSessionTable:
    """The open sessions.

    Args:
        most_sessions: that are open at once.
        most_runs: adapters in all sessions.
        idle_s: seconds after which a session that is not heard of is over; clients call every ten seconds.
    """

    def __init__(self, most_sessions: int, most_runs: int, idle_s: float) -> None:
        self._most_sessions, self._most_runs, self._idle_s = most_sessions, most_runs, idle_s
        self._sessions: dict[str, Session] = {}

    def open(self, user_metadata: dict[str, Any] | None, display_name: str | None) -> Session:
        """Open a session.

        Raises:
            RequestError: there are too many.
        """
        if len(self._sessions) >= self._most_sessions:
            raise RequestError(f"{len(self._sessions)} sessions are open (--max-sessions); close one, or wait")
        session = Session(secrets.token_hex(8), user_metadata, display_name)
        self._sessions[session.id] = session
        return session

    def get(self, id: str) -> Session:
        """Return an open session, which was heard of now.

        Raises:
            RequestError: there is none of this id.
        """
        session = self._sessions.get(id)
        if session is None:
            raise RequestError(f"session_id={id!r}: there is no such session, or it is over")
        session.heard_at = time.monotonic()
        return session

    def add_run(self, session: Session, number: int, user_metadata: dict[str, Any] | None) -> AdapterRun:
        """Add a training run without an adapter.

        Raises:
            RequestError: there are too many.
        """
        if sum(len(other.runs) for other in self._sessions.values()) >= self._most_runs:
            raise RequestError(
                f"this server holds {self._most_runs} adapters at once (--max-adapters), and all are taken; close a "
                "session that is done (ServiceClient.close)"
            )
        run = AdapterRun(f"{session.id}:train:{number}", session.id, user_metadata=user_metadata)
        session.runs[run.id] = run
        return run

    def run(self, id: str) -> AdapterRun:
        """Return a training run.

        Raises:
            RequestError: there is none of this id.
        """
        session = self._sessions.get(id.partition(":")[0])
        if session is None or id not in session.runs:
            raise RequestError(f"model_id={id!r}: there is no such training run, or its session is over")
        session.heard_at = time.monotonic()
        return session.runs[id]

    def sampler(self, id: str) -> SamplingSource:
        """Return a sampler.

        Raises:
            RequestError: there is none of this id.
        """
        session = self._sessions.get(id.partition(":")[0])
        if session is None or id not in session.samplers:
            raise RequestError(f"sampling_session_id={id!r}: there is no such sampler, or its session is over")
        session.heard_at = time.monotonic()
        return session.samplers[id]

    def add_sampler(
        self, session: Session, number: int, weights: SavedWeights | None, path: str | None
    ) -> SamplingSource:
        """Add a sampler."""
        sampler = SamplingSource(f"{session.id}:sample:{number}", session.id, weights, path)
        session.samplers[sampler.id] = sampler
        return sampler

    def close(self, id: str) -> Session | None:
        """Forget a session; None: there is none of this id."""
        return self._sessions.pop(id, None)

    def silent(self) -> Iterator[str]:
        """Yield the ids of sessions that were not heard of for too long."""
        now = time.monotonic()
        yield from [session.id for session in self._sessions.values() if now - session.heard_at > self._idle_s]
