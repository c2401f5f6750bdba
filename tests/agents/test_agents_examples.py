"""The examples about agents: an OpenAI client with a calculator, and the retrieval server behind the tool `search`."""

import asyncio
import importlib
import json
import math
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator

import pytest

from hybridrl.agents.tools.builtin import Calculator, HttpSearch, evaluate

CORPUS = [
    "Ansk\nAnsk is the capital of Morveth.",
    "Lutz\nLutz is a town in Zubrovia, and a town it stays.",
    "Kelp\nA plant.",
]


@pytest.fixture
def client(repository, monkeypatch):
    monkeypatch.syspath_prepend(repository / "examples")
    return importlib.import_module("calculator_client")


def test_the_client_describes_the_tool_that_the_model_was_warm_started_with(client) -> None:
    assert [Calculator({}).tool_schema] == client.TOOLS


@pytest.mark.parametrize("expression", ["37*58", "2146+12", "7 - 9", "0*10"])
def test_the_client_computes_as_the_tool_does(client, expression) -> None:
    assert client.compute(json.dumps({"expression": expression})) == str(evaluate(expression))


@pytest.mark.parametrize(
    "arguments", ["", "{}", "[]", '{"expression": 3}', '{"expression": "2**99"}', '{"expression": "1+2+3"}']
)
def test_the_client_tells_the_model_what_it_cannot_compute(client, arguments) -> None:
    assert client.compute(arguments).startswith("Error: ")


@pytest.fixture(scope="module")
def server(repository, tmp_path_factory) -> Iterator[str]:
    corpus = tmp_path_factory.mktemp("corpus") / "corpus.jsonl"
    corpus.write_text("".join(json.dumps({"contents": text}) + "\n" for text in CORPUS))
    command = [sys.executable, str(repository / "examples" / "retrieval_server.py"), str(corpus), "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    yield process.stdout.readline().split()[0]
    process.kill()
    process.communicate()


def test_the_search_tool_reads_what_the_server_finds(server) -> None:
    tool = HttpSearch({"retrieval_service_url": server, "topk": 1})
    response, _, metrics = asyncio.run(tool.execute("", {"query_list": ["capital of Morveth?", "xyz"]}))
    assert response.text == "Doc 1 (Title: Ansk)\nAnsk is the capital of Morveth.\n---\nNo documents were found."
    assert metrics == {"queries": 2}


def test_scores_are_those_of_the_formula(server) -> None:
    body = json.dumps({"queries": ["town"], "topk": 3}).encode()
    with urllib.request.urlopen(urllib.request.Request(server, body)) as answer:
        ((found,),) = json.load(answer)["result"]
    lengths = [7, 12, 3]  # words of each document; town stands twice in the second alone
    rare = math.log(1 + (3 - 1 + 0.5) / (1 + 0.5))
    wanted = rare * 2 * 2.2 / (2 + 1.2 * (0.25 + 0.75 * lengths[1] / (sum(lengths) / 3)))
    assert found["document"]["contents"] == CORPUS[1] and found["score"] == pytest.approx(wanted)


@pytest.mark.parametrize("body", ["", "[]", '{"queries": 3}', "{"])
def test_a_wrong_request_is_refused(server, body) -> None:
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(urllib.request.Request(server, body.encode(), method="POST"))
    assert caught.value.code == 400 and "queries" in json.load(caught.value)["error"]
