"""The queue of a pool: which replica gets which request."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st
from pool_tools import SAMPLED, requests

from hybridrl.rollout.replicas.balancer import Balancer
from hybridrl.rollout.request import CLIENT_PRIORITY, Request


@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(1, 6)), max_size=40),
    st.integers(1, 8),
    st.integers(1, 4),
)
def test_the_balancer_gives_every_request_once_and_never_too_many(groups, window, replicas) -> None:
    balancer = Balancer(window)
    asked = [
        Request(f"{number}-{i}", [1], SAMPLED, session=f"s{session}")
        for number, (session, size) in enumerate(groups)
        for i in range(size)
    ]
    balancer.add(asked)
    loads = dict.fromkeys(range(replicas), 0)
    given_out: list[str] = []
    while len(balancer):
        taken = balancer.take(loads)
        assert taken, "nothing was given although every replica has room"
        for index, found in taken.items():
            loads[index] += len(found)
            given_out += [request.id for request in found]
        assert max(loads.values()) <= window
        assert not len(balancer) or min(loads.values()) == window  # nobody idles while requests wait
        loads = dict.fromkeys(loads, 0)
    assert sorted(given_out) == sorted(request.id for request in asked)


def test_a_session_stays_where_it_was_and_new_ones_go_where_least_is_in_flight() -> None:
    balancer = Balancer(window=4)
    balancer.add([Request(f"a{i}", [1], SAMPLED, session="a") for i in range(3)])
    balancer.add([Request("b0", [1], SAMPLED, session="b")])
    taken = balancer.take({0: 0, 1: 0})
    assert [r.id for r in taken[0]] == ["a0", "a1", "a2"] and [r.id for r in taken[1]] == ["b0"]
    balancer.add([Request("a3", [1], SAMPLED, session="a"), Request("b1", [1], SAMPLED, session="b")])
    taken = balancer.take({0: 1, 1: 1})
    assert [r.id for r in taken[0]] == ["a3"] and [r.id for r in taken[1]] == ["b1"]
    balancer.forget(0)
    balancer.add([Request("a4", [1], SAMPLED, session="a")])
    assert list(balancer.take({0: 3, 1: 1})) == [1]


@given(st.lists(st.tuples(st.integers(0, 3), st.booleans()), max_size=30))
def test_the_queue_is_in_the_order_of_priority_then_of_arrival(entries) -> None:
    balancer = Balancer(window=2)
    expected: list[tuple[int, float, str]] = []
    for number, (priority, lost) in enumerate(entries):
        request = Request(str(number), [1], SAMPLED, priority=priority)
        balancer.add([request], first=lost)
        expected.append((priority, -number if lost else number + 0.5, request.id))
    order = [name for _, _, name in sorted(expected)]
    assert len(balancer) == len(order)
    taken = [request.id for request in balancer.take({0: 0}).get(0, [])]
    rest = [request.id for request in balancer.clear()]
    assert taken + rest == order and len(taken) == min(2, len(order)) and not len(balancer)


def test_60_000_samples_of_guests_leave_places_to_training() -> None:
    balancer = Balancer(window=10, client_window=4)
    balancer.add(replace(request, priority=CLIENT_PRIORITY) for request in requests(60_000, "guest"))
    taken = balancer.take({0: 0, 1: 0})
    assert {index: len(found) for index, found in taken.items()} == {0: 4, 1: 4}
    assert not balancer.take({0: 4, 1: 4}, {0: 4, 1: 4}), "the other places are kept free"
    balancer.add(requests(8, "training"))
    taken = balancer.take({0: 4, 1: 3}, {0: 4, 1: 3})
    assert sum(request.id.startswith("training") for found in taken.values() for request in found) == 8
    assert [request.id for found in taken.values() for request in found if request.priority] == ["guest8"]


def test_a_lost_replicas_requests_come_before_those_that_waited() -> None:
    balancer = Balancer(window=10)
    balancer.add(requests(2, "late"))
    balancer.add(requests(2, "lost"), first=True)
    assert [request.id for request in balancer.take({0: 0})[0]] == ["lost0", "lost1", "late0", "late1"]
