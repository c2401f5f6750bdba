"""A language model as judge, behind a real endpoint or served by the run: its questions, how answers are read, and what
is no score.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from hybridrl.config import load_config
from hybridrl.reward import RewardError, create_reward_manager
from hybridrl.reward.factory import check_reward
from hybridrl.reward.judge import JudgeAnswer, last_score
from hybridrl.reward.scorers import judges_in
from hybridrl.scored import Reason, UnscoredError
from hybridrl.trainer.ppo.role_groups import active_roles


class Endpoint(BaseHTTPRequestHandler):
    """Answers as the test says, with the OpenAI chat API."""

    def do_GET(self) -> None:
        self._send(200, {"data": [{"id": name} for name in self.server.models]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.server.lock:
            self.server.asked.append((body, self.headers.get("Authorization")))
        text = self.server.answer(body["messages"][-1]["content"])
        text, reason = text if isinstance(text, tuple) else (text, "stop")
        if text is None:
            self._send(500, {"error": "no"})
        else:
            self._send(200, {"choices": [{"message": {"role": "assistant", "content": text}, "finish_reason": reason}]})

    def _send(self, status: int, body: dict) -> None:
        self.send_response(status)
        self.end_headers()
        self.wfile.write(json.dumps(body).encode())

    def log_message(self, *_) -> None:
        pass


@contextlib.contextmanager
def endpoint(answer=lambda question: "Good.\nScore: 7", models=("judge",)):
    with ThreadingHTTPServer(("127.0.0.1", 0), Endpoint) as server:
        server.answer, server.models, server.asked, server.lock = answer, models, [], threading.Lock()
        server.url = f"http://127.0.0.1:{server.server_port}/v1"
        threading.Thread(target=server.serve_forever, args=(0.02,)).start()
        try:
            yield server
        finally:
            server.shutdown()


@pytest.fixture
def judged_by(tokenizer):
    """A manager whose judge is behind an endpoint."""
    made = []

    def make(url: str, *more: str):
        model, where = "reward.reward_model", "reward.reward_model.judge"
        words = [f"{model}.enable=True", f"{where}.url={url}", f"{where}.attempts=1", "reward.num_workers=1", *more]
        config = load_config("ppo_trainer", ["actor_rollout_ref.model.path=/nowhere", *words])
        made.append(create_reward_manager(config, tokenizer))
        return made[-1]

    yield make
    for manager in made:
        manager.close()


def rows(*truths):
    return {
        "reward_model": [{"style": "rule", "ground_truth": truth} for truth in truths],
        "raw_prompt": [[{"role": "user", "content": f"What is {truth}?"}] for truth in truths],
    }


def test_a_judge_alone_is_asked_about_each_response(judged_by, make_batch, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "open sesame")
    with endpoint(lambda question: f"It says so.\n**Score:** {len(question.split('Answer:')[1].split()[0])}") as server:
        manager = judged_by(
            server.url, "reward.reward_model.weight=0.5", "reward.reward_model.judge.system_prompt=Be fair."
        )
        check_reward(manager.config)
        found = manager(make_batch(["abc", "a"], **rows("7", "8")), return_dict=True)
    assert found["reward_tensor"].sum(dim=-1).tolist() == [1.5, 0.5]
    assert found["reward_extra_info"]["judge"] == [3.0, 1.0]
    assert found["reward_extra_info"]["judge/judgement"][0].startswith("It says so.")
    body, token = server.asked[0]
    assert token == "Bearer open sesame" and body["model"] == "judge" and body["temperature"] == 0.0
    assert body["messages"][0] == {"role": "system", "content": "Be fair."} and body["max_tokens"] == 1024
    assert all(word in body["messages"][1]["content"] for word in ("What is", "right answer says", "Score: N"))
    assert "reward_model" not in [spec.name for spec in active_roles(manager.config)]


def test_a_judge_adds_to_a_function(judged_by, make_batch, user_file):
    path = user_file("def compute_score(solution_str, ground_truth): return float(len(solution_str))")
    with endpoint() as server:
        manager = judged_by(server.url, f"reward.custom_reward_function.path={path}", "reward.reward_model.weight=0.1")
        found = manager(make_batch(["abc"], **rows("7")), return_dict=True)
    assert found["reward_tensor"].sum().item() == pytest.approx(3.7)
    assert (found["reward_extra_info"]["function"], found["reward_extra_info"]["judge"]) == ([3.0], [7.0])


PARSE = """
def grade(text, sample):
    if "refuse" in text:
        raise ValueError("no grade")
    return {"score": {"A": 1.0, "F": 0.0}.get(text[-1]), "truth": sample["ground_truth"]}
"""


def test_template_and_parser_of_ones_own(judged_by, make_batch, user_file, tmp_path):
    (tmp_path / "question.txt").write_text("{{ messages[0].content }} -> {{ response }} ({{ ground_truth }})")
    words = [
        f"reward.reward_model.judge.template={tmp_path / 'question.txt'}",
        f"reward.reward_model.judge.parse.path={user_file(PARSE)}",
        "reward.reward_model.judge.parse.name=grade",
        "reward.reward_model.judge.extra_body={seed: 3}",
    ]
    answers = {"x": "So: A", "y": "So: F", "z": "I refuse", "w": "So: ?"}
    with endpoint(lambda question: answers[question.split("-> ")[1][0]]) as server:
        found = judged_by(server.url, *words)(make_batch(list("xyzw"), **rows("7", "8", "9", "10")), return_dict=True)
    assert found["reward_tensor"].sum(dim=-1).tolist()[:2] == [1.0, 0.0]
    assert [one and one.reason for one in found["missing"]] == [None, None, Reason.GRADING, Reason.GRADING]
    assert "no grade" in found["missing"][2].detail and found["reward_extra_info"]["judge/truth"][:2] == ["7", "8"]
    assert {body["messages"][0]["content"] for body, _ in server.asked} >= {"What is 7? -> x (7)"}
    assert all(body["seed"] == 3 for body, _ in server.asked)


def test_no_answer_and_one_without_a_score_are_unscored_and_never_0(judged_by, make_batch):
    answers = {"a": "I cannot say", "b": "", "c": None, "d": "Score: 0"}
    with endpoint(lambda question: answers[question.split("Answer:\n")[1][0]]) as server:
        found = judged_by(server.url)(make_batch(list("abcd"), **rows("1", "2", "3", "4")), return_dict=True)
    reasons = [one and one.reason for one in found["missing"]]
    assert reasons == [Reason.GRADING, Reason.GRADING, Reason.INFRA, None]
    tensor = found["reward_tensor"].sum(dim=-1)
    assert tensor.isnan().tolist() == [True, True, True, False] and tensor[3] == 0.0


def test_the_wait_for_the_judge_is_not_the_time_of_a_sample(judged_by, make_batch):
    """Six samples of a second each, one after the other, within a limit of four seconds."""

    def answer(question):
        time.sleep(1.0)
        return "Score: 7"

    where = "reward.reward_model.judge"
    with endpoint(answer) as server:
        manager = judged_by(server.url, f"{where}.max_concurrent=1", f"{where}.timeout_s=4")
        found = manager(make_batch(["a"] * 6, **rows(*"123456")), return_dict=True)
    assert found["missing"] == [None] * 6 and found["reward_tensor"].sum() == 42.0


@pytest.mark.parametrize(
    ("words", "models", "error"),
    [
        (["model=other"], ["judge"], "has judge"),
        ([], ["one", "two"], "has one, two"),
        (["template=/nowhere.txt"], ["judge"], "template=/nowhere.txt"),
        (["parse.path=/nowhere.py"], ["judge"], "/nowhere.py"),
    ],
)
def test_what_cannot_work_is_refused_before_a_run(judged_by, words, models, error):
    with endpoint(models=models) as server:
        manager = judged_by(server.url, *(f"reward.reward_model.judge.{word}" for word in words))
        with pytest.raises(RewardError, match=error):
            check_reward(manager.config)


def test_an_endpoint_that_is_not_there_is_refused_before_a_run(judged_by):
    with endpoint() as server:
        manager = judged_by(server.url)
    with pytest.raises(RewardError, match="does not list its models"):
        check_reward(manager.config)


@pytest.mark.parametrize(
    ("text", "score"),
    [
        ("Score: 7", 7.0),
        ("score = -1.5", -1.5),
        ("**Score:** 8/10", 8.0),
        ("Score: 1\nFinal score: 2", 2.0),
        ("7", None),
        ("Score: 1e-3", 0.001),
        ("Score: .5", 0.5),
        ("Score: +2", 2.0),
        ("Score: \u22125", -5.0),
        ("Score: 7, because 3 reasons speak for it", 7.0),
        ("Score: 1,000", None),
        ("Score: 1,5", None),
        ("Score: 7-8", None),
        ("Score: 7\u20138", None),
        ("The best answer has Score: 10.\nScore: N/A", None),
        ("An answer with Score: 10 would be right.\n**Score:** none", None),
    ],
)
def test_the_last_score_of_a_text(text, score):
    assert last_score(text, {}) == score


@pytest.mark.parametrize(
    ("text", "score"),
    [
        ("Good.\nScore: 1", None),  # of 10
        ("Good.\nScore: 1.", None),  # of 1.5
        ("Good.\nScore: 1\n", 1.0),
        ("Good.\nScore: 1 out of", None),
        ("**Final score:** 8/10\nIt says why", 8.0),
        ("An answer with Score: 10 would", None),
        ("An answer with Score: 10 would be right.\nScore", None),
        ("An answer with Score: 10 would be right.\n**Sco", None),
    ],
)
def test_a_number_at_which_an_answer_was_cut_is_no_score(judged_by, served_by, make_batch, text, score):
    with endpoint(lambda question: (text, "length")) as server:
        behind = judged_by(server.url)(make_batch(["a"], **rows("1")), return_dict=True)

    async def answer(messages):
        return JudgeAnswer(text, 0.25, is_cut=True)

    served = served_by(answer)(make_batch(["a"], **rows("1")), return_dict=True)
    for found in (behind, served):
        assert found["reward_extra_info"].get("judge", [None]) == [score]
        assert [one and one.reason for one in found["missing"]] == [None if score else Reason.GRADING]


def test_a_parser_of_ones_own_knows_whether_an_answer_was_cut(judged_by, make_batch, user_file):
    path = user_file("def parse(text, sample): return 2.0 if sample['is_cut'] else 1.0")
    with endpoint(lambda question: ("Yes", "length" if "cut" in question else "stop")) as server:
        manager = judged_by(server.url, f"reward.reward_model.judge.parse.path={path}")
        found = manager(make_batch(["cut", "not"], **rows("1", "2")), return_dict=True)
    assert found["reward_extra_info"]["judge"] == [2.0, 1.0]


@pytest.mark.parametrize("value", ["10**400", "float('nan')", "np.ma.masked", "[1.0]", "True and '1'"])
def test_what_a_parser_returns_follows_the_rules_of_a_reward_function(judged_by, make_batch, user_file, value):
    path = user_file(f"import numpy as np\ndef parse(text): return {value}")
    with endpoint() as server:
        manager = judged_by(server.url, f"reward.reward_model.judge.parse.path={path}")
        found = manager(make_batch(["a"], **rows("1")), return_dict=True)
    assert [one and one.reason for one in found["missing"]] == [Reason.GRADING]


def test_a_parser_may_return_a_number_of_numpy(judged_by, make_batch, user_file):
    path = user_file("import numpy as np\ndef parse(text): return {'score': np.float32(0.5), 'more': np.arange(2)}")
    with endpoint() as server:
        manager = judged_by(server.url, f"reward.reward_model.judge.parse.path={path}")
        found = manager(make_batch(["a"], **rows("1")), return_dict=True)
    assert found["reward_extra_info"]["judge"] == [0.5] and found["reward_extra_info"]["judge/more"] == [[0, 1]]


# ---------------------------------------------------------------- a judge that the run serves


@pytest.fixture
def served_by(tokenizer):
    """A manager whose judge is what a test gives; the run would give replicas of an engine."""
    made = []

    def make(answer, *more: str):
        model = "reward.reward_model"
        words = [f"{model}.enable=True", f"{model}.judge.enable=True", f"{model}.rollout.name=vllm", *more]
        config = load_config("ppo_trainer", ["actor_rollout_ref.model.path=/nowhere", *words])
        made.append(create_reward_manager(config, tokenizer))
        for judge in judges_in(made[-1].pool):
            judge.connect(answer)
        return made[-1]

    yield make
    for manager in made:
        manager.close()


def answering(texts: dict[str, str | None], asked: list | None = None):
    """Answers by the first letter of a response, as `endpoint` does with the same texts."""

    async def answer(messages):
        if asked is not None:
            asked.append(messages)
        text = texts[messages[-1]["content"].split("-> ")[1][0]]
        if text is None:
            raise UnscoredError(Reason.INFRA, "the engine refused it")
        return JudgeAnswer(text, 0.25)

    return answer


def test_a_served_judge_follows_the_rules_of_one_behind_an_endpoint(
    judged_by, served_by, make_batch, user_file, tmp_path
):
    (tmp_path / "question.txt").write_text("{{ messages[0].content }} -> {{ response }} ({{ ground_truth }})")
    where = "reward.reward_model.judge"
    more = [f"{where}.template={tmp_path / 'question.txt'}", f"{where}.parse.path={user_file(PARSE)}"]
    more += [f"{where}.parse.name=grade", f"{where}.system_prompt=Be fair.", "reward.reward_model.weight=0.5"]
    texts = {"x": "So: A", "y": "So: F", "z": "I refuse", "w": "So: ?", "v": "", "u": None}
    asked: list = []
    batch = make_batch(list("xyzwvu"), **rows(*"123456"))
    with endpoint(lambda question: texts[question.split("-> ")[1][0]]) as server:
        expected = judged_by(server.url, *more)(batch, return_dict=True)
        sent = [body["messages"] for body, _ in server.asked]
    found = served_by(answering(texts, asked), *more)(batch, return_dict=True)
    assert sorted(map(str, asked)) == sorted(map(str, sent))
    assert found["reward_tensor"].nan_to_num(-1).equal(expected["reward_tensor"].nan_to_num(-1))
    assert found["reward_extra_info"] == expected["reward_extra_info"]
    reasons = [one and one.reason for one in found["missing"]]
    assert reasons == [one and one.reason for one in expected["missing"]]
    assert reasons == [None, None, Reason.GRADING, Reason.GRADING, Reason.GRADING, Reason.INFRA]
    assert 0.25 < found["metrics"]["timing_s/reward_sample/max"] < 0.25 + 60


def test_a_served_judge_is_asked_side_by_side_and_before_it_is_there_not_at_all(served_by, make_batch, tmp_path):
    """Each of eight questions is answered only once all have been asked."""
    (tmp_path / "question.txt").write_text("{{ response }}")
    together = asyncio.Event()
    waiting: list[str] = []

    async def answer(messages):
        waiting.append(messages[-1]["content"])
        if len(waiting) == 8:
            together.set()
        await together.wait()
        return JudgeAnswer("Score: 3", 0.0)

    template = f"reward.reward_model.judge.template={tmp_path / 'question.txt'}"
    manager = served_by(answer, template)
    found = manager(make_batch(list("abcdefgh"), **rows(*"12345678")), return_dict=True)
    assert sorted(waiting) == list("abcdefgh") and found["reward_tensor"].sum() == 24.0
    early = create_reward_manager(manager.config, manager.tokenizer)
    with contextlib.closing(early), pytest.raises(RewardError, match="has not loaded its models yet"):
        early(make_batch(["a"], **rows("1")))


def test_what_a_served_judge_has_not_answered_is_given_up_with_the_run(served_by, make_batch, tmp_path):
    (tmp_path / "question.txt").write_text("{{ response }}")
    asked, given_up = threading.Event(), threading.Event()

    async def answer(messages):
        asked.set()
        try:
            await asyncio.Event().wait()
        finally:
            given_up.set()

    manager = served_by(answer, f"reward.reward_model.judge.template={tmp_path / 'question.txt'}")
    (future,) = manager.submit(make_batch(["a"], **rows("1")))
    assert asked.wait(60) and not future.done()
    manager.close()
    assert given_up.wait(60)
    with pytest.raises(RewardError, match="closed"):
        future.result(60)


@pytest.mark.parametrize("word", ["template=/nowhere.txt", "parse.path=/nowhere.py"])
def test_a_served_judge_that_cannot_work_is_refused_before_a_run(served_by, word):
    manager = served_by(answering({}), f"reward.reward_model.judge.{word}")
    with pytest.raises(RewardError, match=word.split("=")[1]):
        check_reward(manager.config)
