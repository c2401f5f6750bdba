"""The server and its client: tokens, sizes, queues, servers that fail; and the limit on programs at once."""

import contextlib
import http.client
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.parse
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from http_attacks import ATTACKS, BAD_FRAMES, answer_to
from raising import raises_with
from sandbox_tools import started_server

from hybridrl.sandbox import Limits, LocalSandbox, Program, RemoteSandbox, SandboxError, Slots
from hybridrl.sandbox.server import main
from hybridrl.scored import Reason
from hybridrl.utils import clock


@pytest.fixture(scope="module")
def server():
    with started_server(
        "--max-body-mb", "1", "--max-queue", "64", env={"HYBRIDRL_SANDBOX_TOKEN": "open sesame"}
    ) as url:
        yield url


def post(url: str, body: bytes | dict, token: str | None = "open sesame", **headers: str) -> tuple[int, dict]:
    """What the server answers, by a client that knows nothing of it."""
    parts = urllib.parse.urlsplit(url)
    connection = http.client.HTTPConnection(parts.netloc, timeout=60)
    data = json.dumps(body).encode() if isinstance(body, dict) else body
    given = {"Authorization": f"Bearer {token}"} if token else {}
    connection.request("POST", parts.path, data, given | headers)
    answer = connection.getresponse()
    return answer.status, json.loads(answer.read())


def test_the_api_of_sandboxfusion(server) -> None:
    status, answer = post(
        server, {"code": "print(input()[::-1])", "language": "python", "stdin": "abc", "run_timeout": 9}
    )
    assert status == 200 and answer["status"] == "Success" and answer["compile_result"] is None
    result = answer["run_result"]
    assert (result["status"], result["return_code"], result["stdout"], result["stderr"]) == ("Finished", 0, "cba\n", "")
    assert 0 < result["execution_time"] < 9
    failed = post(server, {"code": "raise SystemExit(3)", "language": "python"})[1]
    assert (failed["status"], failed["run_result"]["return_code"]) == ("Failed", 3)
    slow = post(server, {"code": "import time; time.sleep(60)", "language": "python", "run_timeout": 0.5})[1]
    assert (slow["status"], slow["run_result"]["status"]) == ("Failed", "TimeLimitExceeded")


@pytest.mark.parametrize("token", [None, "open", "open sesame!"])
def test_a_token_is_needed(server, token) -> None:
    assert post(server, {"code": "", "language": "python"}, token)[0] == 401
    with pytest.raises(SandboxError, match="401"):
        RemoteSandbox(server, token=token or "none").run(Program("print(1)"))


@pytest.mark.parametrize(
    ("body", "word"),
    [
        ({"language": "python"}, "code"),
        ({"code": "", "language": "cobol"}, "cobol"),
        ({"code": "", "language": "python", "run_timeout": 1e9}, "run_timeout"),
        ({"code": "", "language": "python", "run_timeout": -1}, "run_timeout"),
        ({"code": "", "language": "python", "memory_limit_MB": 10**6}, "memory_limit_MB"),
        ({"code": "", "language": "python", "files": {"../x": ""}}, "relative"),
        ({"code": "", "language": "python", "files": {"x": "%"}}, "base64"),
        ({"code": "", "language": "python", "priority": 3}, "priority"),
    ],
)
def test_what_is_not_served_is_refused_by_name(server, body, word) -> None:
    status, answer = post(server, body)
    assert status == 422 and word in answer["detail"]


def answer_to_length(url: str, length: int) -> int:
    """The status of the answer to a body of this length, which is announced and not sent: the server may not wait."""
    parts = urllib.parse.urlsplit(url)
    with contextlib.closing(http.client.HTTPConnection(parts.netloc, timeout=60)) as connection:
        connection.putrequest("POST", parts.path)
        for name, value in (("Content-Type", "application/json"), ("Content-Length", str(length))):
            connection.putheader(name, value)
        connection.putheader("Authorization", "Bearer open sesame")
        connection.endheaders()
        return connection.getresponse().status


def test_bodies(server) -> None:
    assert answer_to_length(server, 2**21) == 413
    assert post(server, b"{")[0] == 400
    assert post(server.replace("run_code", "other"), {"code": ""})[0] == 404


def test_a_full_queue_is_refused_and_the_client_waits(monkeypatch, tmp_path) -> None:
    """One program runs and none may wait: of four clients at once, all get their result."""
    monkeypatch.setenv("HYBRIDRL_SANDBOX_TOKEN", "t")
    own = {"TMPDIR": str(tmp_path)}  # nothing else takes places of this server's
    with started_server("--max-concurrent", "1", "--max-queue", "1", env=own) as url:
        sandbox = RemoteSandbox(url, pause_s=0.05)
        with ThreadPoolExecutor(8) as threads:
            found = list(
                threads.map(lambda n: sandbox.run(Program(f"import time; time.sleep(0.1); print({n})")), range(8))
            )
        assert [one.output for one in found] == [f"{n}\n" for n in range(8)]
        mark = f"{time.time_ns()}"
        hold, other = in_thread(url, marked(mark)), in_thread(url, Program(""))
        hold.start()
        while mark not in running():  # the other one would else be first
            time.sleep(0.02)
        other.start()
        while health(url)["taken"] < 2:
            time.sleep(0.01)
        assert post(url, {"code": "", "language": "python"}, "t")[0] == 429
        with pytest.raises(SandboxError, match="429"):
            RemoteSandbox(url, patience_s=0.2, pause_s=0.05).run(Program(""))
    hold.join(), other.join()


def marked(mark: str) -> Program:
    """Waits, with the mark among its arguments."""
    words = ["python", "-c", "import time; time.sleep(100)", mark]
    return Program(f"import os\nos.execv({sys.executable!r}, {words!r})")


def in_thread(url: str, program: Program) -> threading.Thread:
    """Asks for a program, whether or not the server lives on until its end."""

    def run() -> None:
        with contextlib.suppress(SandboxError):
            RemoteSandbox(url, Limits(wall_s=100), attempts=1).run(program)

    return threading.Thread(target=run)


def health(url: str) -> dict:
    parts = urllib.parse.urlsplit(url)
    connection = http.client.HTTPConnection(parts.netloc, timeout=60)
    connection.request("GET", "/health")
    return json.loads(connection.getresponse().read())


@pytest.mark.parametrize("attack", ATTACKS)
def test_a_client_is_served_during_an_attack(server, attack) -> None:
    parts = urllib.parse.urlsplit(server)
    with attack((parts.hostname, parts.port), "/run_code"):
        assert post(server, {"code": "print(1)", "language": "python"})[1]["run_result"]["stdout"] == "1\n"


def test_bad_framing_is_refused(server) -> None:
    parts = urllib.parse.urlsplit(server)
    for data in BAD_FRAMES:
        assert answer_to((parts.hostname, parts.port), data)[9:10] in (b"4", b"")
    assert health(server)["status"] == "ok"


def test_programs_of_clients_that_vanish_are_killed() -> None:
    """Those that run, those that are compiled, and those that wait."""
    with started_server("--max-concurrent", "3", env={"HYBRIDRL_SANDBOX_TOKEN": ""}) as url:
        parts, mark = urllib.parse.urlsplit(url), f"{time.time_ns()}"
        connections = []
        for number in range(40):
            body = {"code": marked(mark).code, "language": "python", "run_timeout": 100}
            if number % 2 and number > 3:
                body = {"code": "int main() { for (;;); }", "language": "cpp", "run_timeout": 100}
            connection = http.client.HTTPConnection(parts.netloc, timeout=60)
            connection.request("POST", parts.path, json.dumps(body))
            connections.append(connection)
        deadline = time.monotonic() + 60
        while (health(url)["taken"] < 40 or mark not in running()) and time.monotonic() < deadline:
            time.sleep(0.02)
        assert health(url)["taken"] == 40 and mark in running()
        for connection in connections:
            connection.close()
        deadline = time.monotonic() + 60
        while (health(url)["taken"] or mark in running()) and time.monotonic() < deadline:
            time.sleep(0.02)
        assert health(url)["taken"] == 0 and mark not in running()
        assert post(url, {"code": "print(1)", "language": "python"}, None)[1]["run_result"]["stdout"] == "1\n"


def test_a_server_for_others_needs_a_token(monkeypatch, capsys) -> None:
    monkeypatch.delenv("HYBRIDRL_SANDBOX_TOKEN", raising=False)
    assert main(["--host", "0.0.0.0", "--port", "0"]) == 2
    assert "--no-token" in capsys.readouterr().err


def test_programs_end_with_the_server() -> None:
    """Also where it is killed."""
    mark = f"{time.time_ns()}"
    command = [sys.executable, "-m", "hybridrl.sandbox.server", "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        url = process.stdout.readline().split()[-1]
        client = in_thread(url, marked(mark))
        client.start()
        while mark not in running():
            time.sleep(0.02)
        process.send_signal(signal.SIGKILL)
        client.join()
    deadline = time.monotonic() + 60
    while mark in running() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert mark not in running()


def running() -> str:
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError), open(f"/proc/{name}/cmdline", errors="replace") as file:
            found.append(file.read())
    return " ".join(found)


class Scripted(BaseHTTPRequestHandler):
    """A server that answers as it is told, one entry per request, the last one again and again."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        answers = self.server.answers
        status, body = answers.pop(0) if len(answers) > 1 else answers[0]
        self.server.asked += 1
        if status is None:
            self.connection.close()
            return
        self.send_response(status)
        self.end_headers()
        self.wfile.write(json.dumps(body).encode() if not isinstance(body, bytes) else body)

    def log_message(self, *_) -> None:
        pass


@contextlib.contextmanager
def scripted(*answers):
    with ThreadingHTTPServer(("127.0.0.1", 0), Scripted) as server:
        server.answers, server.asked = list(answers), 0
        threading.Thread(target=server.serve_forever, args=(0.02,)).start()
        try:
            yield server, RemoteSandbox(f"http://127.0.0.1:{server.server_port}", pause_s=0.01, attempts=3)
        finally:
            server.shutdown()


GOOD = {"status": "Success", "run_result": {"status": "Finished", "return_code": 0, "stdout": "42\n"}}


@pytest.mark.parametrize(
    "first", [(500, {}), (None, None), (200, b"<html>"), (200, {"status": "SandboxError"}), (429, {}), (503, {})]
)
def test_a_failure_is_tried_again(first) -> None:
    with scripted(first, (200, GOOD)) as (server, sandbox):
        assert sandbox.run(Program("")).output == "42\n" and server.asked == 2


@pytest.mark.parametrize(
    ("answer", "asked"),
    [
        ((500, {}), 3),
        ((200, {"status": "SandboxError", "message": "no room"}), 3),
        ((422, {"detail": "no"}), 1),
        ((200, {"status": "Success"}), 1),
        ((200, {"status": "Success", "run_result": {"status": "Odd"}}), 1),
        ((200, {"status": "Failed", "run_result": {"status": "Error", "return_code": None}}), 1),
    ],
)
def test_a_server_that_fails_gives_unscored(answer, asked) -> None:
    with scripted(answer) as (server, sandbox), pytest.raises(SandboxError) as error:
        sandbox.run(Program(""))
    assert server.asked == asked and error.value.unscored.reason is Reason.INFRA


def test_nobody_listens() -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), Scripted) as server:
        url = f"http://127.0.0.1:{server.server_port}"
    with pytest.raises(SandboxError, match=r"2 attempts.*refused"):
        RemoteSandbox(url, attempts=2, pause_s=0.01).run(Program(""))
    with raises_with(SandboxError, "http://HOST"):
        RemoteSandbox("localhost:8080")


@pytest.fixture
def name(tmp_path, monkeypatch):
    """Of places that no other test has; their files are in the test's folder, here and in programs that it starts."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return "places"


def test_places_are_shared_by_processes(name) -> None:
    """Another process holds the only place: a program waits for it, without its clock; a killed holder frees it."""
    code = (
        "import sys\nfrom hybridrl.sandbox import Slots\n"
        f"with Slots(1, {name!r}).acquired():\n    print('held', flush=True)\n    sys.stdin.read()"
    )
    holder = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert holder.stdout.readline() == "held\n"
    sandbox, found, ready = LocalSandbox(), [], threading.Event()
    sandbox.slots = Slots(1, name)
    measured = clock.Clock()

    def run() -> None:
        with clock.running(measured):
            ready.set()
            found.append(sandbox.run(Program("print(1)"), Limits(wall_s=30)))

    thread = threading.Thread(target=run)
    thread.start()
    ready.wait()
    while not measured.is_stopped:
        time.sleep(0.01)
    thread.join(0.3)
    assert thread.is_alive() and not found
    holder.kill()
    thread.join(60)
    holder.communicate()
    assert found[0].output == "1\n" and not measured.is_stopped


def test_threads_that_wait_for_a_place_of_their_own_process_do_not_look_at_the_files(name, monkeypatch) -> None:
    looked, look = [], Slots.free_place
    monkeypatch.setattr(
        Slots, "free_place", lambda self, folder: looked.append(threading.get_ident()) or look(self, folder)
    )

    def run(_) -> None:
        begun.wait()
        with Slots(1, name).acquired():
            pass

    begun = threading.Barrier(5)
    with ThreadPoolExecutor(4) as threads:
        with Slots(1, name).acquired():
            waiting = threads.map(run, range(4))
            begun.wait()
            time.sleep(0.2)
            assert looked == [threading.get_ident()]
        assert len(list(waiting)) == 4
    assert len(looked) == 5


def test_never_more_at_once_than_allowed(name) -> None:
    slots, events, lock = Slots(2, name), [], threading.Lock()

    def run(_) -> None:
        with slots.acquired():
            with lock:
                events.append(1)
            time.sleep(0.02)
            with lock:
                events.append(-1)

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(run, range(12)))
    counts = [sum(events[:number]) for number in range(len(events) + 1)]
    assert max(counts) == 2 and counts[-1] == 0
