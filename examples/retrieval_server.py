"""A small retrieval server with the interface of Search-R1's, for trying the tool `search` and for small corpora.

    python examples/retrieval_server.py CORPUS.jsonl [--port 8000]

A line of the corpus is `{"contents": "TITLE\\nTEXT"}`. `POST /retrieve {"queries": [...], "topk": 3}` answers
`{"result": [[{"document": {"contents": ...}, "score": ...}, ...], ...]}`, one list per query, the best first: words are
weighted by BM25 (Robertson and Zaragoza 2009; k1 = 1.2, b = 0.75). Everything is in memory. `--port 0` takes a free
port; the first line of output has the address.
"""

import argparse
import asyncio
import json
import math
import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hybridrl.utils.http_server import HttpRefusal, HttpServer, JsonApp, ServingLimits, TokenGuard, listening_socket

K1, B = 1.2, 0.75
LARGEST_BODY = 2**23
WORD = re.compile(r"\w+")


class Index:
    """Documents by their words."""

    def __init__(self, documents: Sequence[str]) -> None:
        self.documents = documents
        counts = [Counter(WORD.findall(text.lower())) for text in documents]
        lengths = [sum(one.values()) for one in counts]
        usual = sum(lengths) / max(len(lengths), 1)
        self.weights: dict[str, dict[int, float]] = defaultdict(dict)  # word -> document -> its share of the score
        having = Counter(word for one in counts for word in one)
        for number, (one, length) in enumerate(zip(counts, lengths, strict=True)):
            for word, count in one.items():
                rare = math.log(1 + (len(documents) - having[word] + 0.5) / (having[word] + 0.5))
                damped = count * (K1 + 1) / (count + K1 * (1 - B + B * length / usual))
                self.weights[word][number] = rare * damped

    def best(self, query: str, count: int) -> list[dict[str, Any]]:
        """The documents that fit a query best; none that has no word of it."""
        scores: dict[int, float] = defaultdict(float)
        for word in WORD.findall(query.lower()):
            for number, weight in self.weights.get(word, {}).items():
                scores[number] += weight
        found = sorted(scores.items(), key=lambda one: (-one[1], one[0]))[:count]
        return [{"document": {"contents": self.documents[number]}, "score": score} for number, score in found]


def service_of(index: Index) -> JsonApp:
    """What answers requests."""

    async def retrieve(body: Any) -> tuple[int, dict[str, Any]]:
        try:
            count = int(body.get("topk") or 3)
            return 200, {"result": [index.best(str(query), count) for query in body["queries"]]}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise HttpRefusal(400, repr(error)) from error

    return JsonApp({("POST", "/retrieve"): retrieve})


def body_of_error(path: str, error: HttpRefusal) -> dict[str, Any]:
    """An error as this API has it."""
    return {"error": f'send {{"queries": [...], "topk": n}}: {error}'}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("corpus", type=Path, help="JSON lines with the column contents")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000, help="0: a free one (8000)")
    arguments = parser.parse_args()
    lines = arguments.corpus.read_text(encoding="utf-8").splitlines()
    documents = [json.loads(line)["contents"] for line in lines if line.strip()]
    listener = listening_socket(arguments.host, arguments.port)
    address = f"http://{arguments.host}:{listener.getsockname()[1]}/retrieve"
    guarded = TokenGuard(service_of(Index(documents)), None, LARGEST_BODY, "LARGEST_BODY", error_body=body_of_error)
    server = HttpServer(guarded, listener, ServingLimits(error_body=body_of_error))
    asyncio.run(server.serve_until_ended(f"{address} serves {len(documents)} documents"))


if __name__ == "__main__":
    main()
