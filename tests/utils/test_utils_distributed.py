"""Helpers for process groups."""

from __future__ import annotations

import os
import socket

import psutil
import pytest

from hybridrl.utils.distributed import use_interface_of

NAME = "GLOO_SOCKET_IFNAME"


def test_gloo_uses_the_interface_of_the_nodes_address(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, addresses in psutil.net_if_addrs().items():
        for address in addresses:
            if address.family == socket.AF_INET:
                monkeypatch.setenv(NAME, "")
                use_interface_of(address.address)
                assert os.environ[NAME] == name
    monkeypatch.setenv(NAME, "eth7")  # the user's choice
    use_interface_of("127.0.0.1")
    assert os.environ[NAME] == "eth7"
    monkeypatch.delenv(NAME)
    use_interface_of("192.0.2.1")  # of no interface here
    assert NAME not in os.environ
