"""Distribution of requests over replicas."""

from collections import OrderedDict, deque
from collections.abc import Iterable, Mapping

from hybridrl.rollout.request import TRAINING_PRIORITY, Request

_REMEMBERED_SESSIONS = 100_000


class Balancer:
    """A queue of requests: each goes to its session's replica, else to the one with the fewest requests in flight.

    The queue is in the order of `Request.priority`, and of arrival within one. A replica gets at most `window` requests
    at once. The others wait here for the next replica that has room, so that long generations on one replica do not
    hold up work that another could do. Requests of clients get a part of the window only, so that training, which comes
    first, finds a place at once.

    Args:
        window: most requests in flight per replica.
        client_window: most of these that are not of training; None: all.
    """

    def __init__(self, window: int, client_window: int | None = None) -> None:
        self.window = window
        self.client_window = window if client_window is None else client_window
        self._queues: dict[int, deque[Request]] = {}
        self._home: OrderedDict[str, int] = OrderedDict()

    def add(self, requests: Iterable[Request], first: bool = False) -> None:
        """Queue requests after the others of their priority, or (those of a lost replica) before them."""
        for request in reversed(list(requests)) if first else requests:
            queue = self._queues.setdefault(request.priority, deque())
            queue.appendleft(request) if first else queue.append(request)

    def __len__(self) -> int:
        return sum(map(len, self._queues.values()))

    def clear(self) -> list[Request]:
        """Remove all requests that wait; returns them in order."""
        waiting = [request for _, queue in sorted(self._queues.items()) for request in queue]
        self._queues.clear()
        return waiting

    def forget(self, replica: int) -> None:
        """Sessions of this replica may go to any other: its cache is lost."""
        for session in [name for name, home in self._home.items() if home == replica]:
            del self._home[session]

    def take(self, in_flight: Mapping[int, int], clients: Mapping[int, int] | None = None) -> dict[int, list[Request]]:
        """Remove the requests that replicas have room for.

        Args:
            in_flight: number of requests at each replica that accepts some.
            clients: how many of these are not of training; None: none.

        Returns:
            Replica -> its new requests.
        """
        loads = dict(in_flight)
        clients_at = dict(clients or dict.fromkeys(loads, 0))
        assigned: dict[int, list[Request]] = {}
        while self._queues:
            is_client = min(self._queues) > TRAINING_PRIORITY
            free = [
                index
                for index, load in loads.items()
                if load < self.window and not (is_client and clients_at[index] >= self.client_window)
            ]
            if not free:
                break
            request = self._next()
            home = self._home.get(request.session, -1)
            if home not in free:
                # A cached prefix saves less than an idle replica costs.
                home = min(free, key=lambda index: (loads[index], index))
            if request.session:
                self._remember(request.session, home)
            loads[home] += 1
            clients_at[home] += is_client
            assigned.setdefault(home, []).append(request)
        return assigned

    def _next(self) -> Request:
        priority = min(self._queues)
        request = self._queues[priority].popleft()
        if not self._queues[priority]:
            del self._queues[priority]
        return request

    def _remember(self, session: str, replica: int) -> None:
        self._home[session] = replica
        self._home.move_to_end(session)
        while len(self._home) > _REMEMBERED_SESSIONS:
            self._home.popitem(last=False)
