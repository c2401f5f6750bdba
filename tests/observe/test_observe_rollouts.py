"""The page of rollouts in a real browser: from disk, without network, whatever text the samples have."""

import json
import math
from collections.abc import Iterator
from pathlib import Path

import pytest
from browser import Browser

from hybridrl.observe.dump import dump_generations
from hybridrl.observe.report import write_report
from hybridrl.observe.rollouts import ROLLOUTS, select_samples, write_rollouts
from hybridrl.observe.run_history import load_history
from hybridrl.observe.tracking import Tracking

PROMPTS = [f"Sort the numbers of case {number}." for number in range(6)]
HOSTILE = [
    "</script><script>document.title = 'stolen'</script>",
    "<img src=x onerror=\"document.title = 'stolen'\">",
    "<style>body { display: none }</style>",
    "before \u202e after \u2066\u200b\x00\x1b[31m",
    "half \ud83d of a character, and \udcff",
    "{{ 7 * 7 }} ${alert(1)} <!-- ]]> &lt;b&gt;",
]


def tokens(step: int, words: list[str], mask: list[int]) -> dict:
    """Tokens of a response, as dumps have them."""
    count = len(words)
    return {
        "prompt_ids": [1, 2, 3],
        "ids": list(range(10, 10 + count)),
        "texts": words,
        "mask": mask,
        "log_probs": [-0.25 * place if mask[place] else 0.0 for place in range(count)],
        "old_log_probs": [-0.5 * place if mask[place] else 0.0 for place in range(count)],
        "advantages": [1.5 if mask[place] else 0.0 for place in range(count)],
        "rewards": [(1, 0.125), (count - 1, step / 10)],
        "versions": [(step - 1, count)],
    }


def session(step: int, fault: str) -> dict:
    words, mask = ["I ", "call", "{tool}", " 1", " 2", "done", "."], [1, 1, 0, 0, 0, 1, 1]
    call = {"kind": "tool", "at": 0.2, "seconds": 0.5, "turn": 0, "name": "sorter", "arguments": {"numbers": [2, 1]}}
    generate = {"kind": "generate", "seconds": 0.1, "prompt_tokens": 3, "tokens": 2, "finish_reason": "stop"}
    return {
        "sample": 0,
        "num_turns": 4,
        "started": 1.7e9,
        "seconds": 0.9,
        "messages": [{"role": "user", "content": "please"}, {"role": "assistant", "content": f"answer {step}"}],
        "events": [
            generate | {"at": 0},
            call | {"response": "1 2", "reward": 0.5, "fault": fault},
            generate | {"at": 0.7},
        ],
        "tokens": tokens(step, words, mask),
    }


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three steps with the same prompts, tools, and texts that want to be markup."""
    folder = tmp_path_factory.mktemp("run")
    with Tracking([], "p", "e", folder) as tracking:
        for step in (1, 2, 3):
            tracking.log({"critic/score/mean": step / 3}, step)
            rollouts: list[dict] = [session(step, "timeout" if number == 0 else "") for number in range(len(PROMPTS))]
            bad = {**tokens(step, HOSTILE, [1] * len(HOSTILE)), "log_probs": [math.nan, -math.inf, *[-1.0] * 4]}
            inputs = [*PROMPTS, *HOSTILE]
            dump_generations(
                folder / "rollouts",
                step,
                inputs,
                [f"answer {step} to {number}" for number in range(len(PROMPTS))] + HOSTILE,
                [step / 10] * len(PROMPTS) + [0.0] * 5 + [math.nan],
                gts=[None] * 11 + [HOSTILE[0]],
                extra={
                    "uid": [f"0-{number}" for number in range(12)],
                    "rollout": [*rollouts, *({"tokens": bad, "messages": None, "note": text} for text in HOSTILE)],
                    HOSTILE[1]: [HOSTILE[0]] * 12,
                },
            )
    write_report(folder)
    return folder


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with Browser(tmp_path_factory.mktemp("browser")) as found:
        yield found


@pytest.fixture
def page(browser: Browser, run: Path) -> Browser:
    """The page, loaded anew."""
    browser.open(run / ROLLOUTS)
    return browser


TITLES = "[...document.querySelectorAll('#list li')].map(node => node.textContent)"
SHOWN = "document.querySelector('main').innerText"


def test_the_page_opens_from_disk_and_asks_nobody(page: Browser, run: Path) -> None:
    assert page.requests == [(run / ROLLOUTS).resolve().as_uri()] and page.told == []
    assert len(page.value(TITLES)) == 36
    assert page.value("document.getElementById('notes').textContent") == "All dumped samples are here."
    assert '<a href="rollouts.html">' in (run / "report.html").read_text()
    assert page.value("document.querySelector('header a').href") == (run / "report.html").resolve().as_uri()


def test_text_of_samples_is_never_markup(page: Browser, run: Path) -> None:
    title = page.value("document.title")
    for number in range(36):
        page.value(f"choose(samples[{number}])")
    page.value("choose(samples[6], samples[18])")
    page.until("document.querySelectorAll('.pane').length === 2")
    assert page.value("document.title") == title and "rollouts" in title
    assert page.value("document.querySelectorAll('script').length") == 2
    assert page.value("document.querySelectorAll('img, style:not(head style), iframe').length") == 0
    assert page.told == [] and len(page.requests) == 1
    seen = {}
    for text in HOSTILE:
        seen[text] = page.value(f"choose(samples.find(one => one.output.startsWith({json.dumps(text[:5])}))), {SHOWN}")
    assert HOSTILE[0] in seen[HOSTILE[0]] and HOSTILE[5] in seen[HOSTILE[5]]
    bidi = seen[HOSTILE[3]]
    assert "before U+202E after U+2066U+200BU+0000U+001B[31m" in bidi
    assert not set(bidi) & set("\u202e\u2066\u200b\x00\x1b")
    assert "half \\ud83d of a character" in seen[HOSTILE[4]]
    source = (run / ROLLOUTS).read_bytes().decode()  # valid UTF-8
    assert "stolen" not in source and source.count("<script") == 2


def test_no_script_but_its_own_would_run(page: Browser) -> None:
    """Should a text become markup after all, the page's policy stops its scripts and its requests."""
    page.value("document.body.insertAdjacentHTML('beforeend', '<img src=x onerror=\"document.title = 1\">')")
    page.value(
        "(() => { const node = document.createElement('script'); node.text = 'document.title = 2';"
        " document.body.append(node); })()"
    )
    page.until("document.querySelectorAll('body img').length === 1")
    assert page.value("document.title") not in ("1", "2") and len(page.told) >= 2
    assert all("Content Security Policy" in text for text in page.told)


def test_turns_tokens_calls_and_rewards(page: Browser) -> None:
    text = page.value(f"choose(samples.find(one => one.prompt === {json.dumps(PROMPTS[0])})), {SHOWN}")
    for part in (
        "model, turn 1",
        "model, turn 2",
        "given 3 tokens",
        "reward 0.125",
        "reward 0.1",
        "timeout",
        "0.1 s, stop",
        "mean log-prob -0.125",
        "sorter:",
        "reward 0.5",
        "session\n0.9 s",
        "weights of step\n0",
    ):
        assert part in text, (part, text)
    assert page.value("document.querySelector('details[open] pre').textContent") == "1 2"  # a call that failed is open
    spans = page.value(
        "[...document.querySelectorAll('.tokens span')].map(node => [node.textContent, node.style.background])"
    )
    assert [text for text, _ in spans] == ["I ", "call", "{tool}", " 1", " 2", "done", "."]
    strength = [float(colour.rsplit(",", 1)[1].rstrip(")")) if colour else None for _, colour in spans]
    painted = [0, 0.0375, None, None, None, 0.1875, 0.225]  # -log p / 5, up to 0.75; tokens that were given have none
    assert strength == [one if one is None else pytest.approx(one, abs=1e-3) for one in painted]


@pytest.mark.parametrize(("colour", "painted"), [("advantage", 4), ("mask", 7), ("trainer - sampler", 4), ("none", 0)])
def test_colours(page: Browser, colour: str, painted: int) -> None:
    page.value(f"choose(samples.find(one => one.prompt === {json.dumps(PROMPTS[1])}))")
    page.value(
        f"form.colour.value = {json.dumps(colour)}, form.colour.dispatchEvent(new Event('input', {{bubbles: true}}))"
    )
    count = "[...document.querySelectorAll('.tokens span')].filter(node => node.style.background).length"
    assert page.value(count) == painted
    assert bool(page.value("document.getElementById('legend').textContent")) == (colour != "none")


def test_filter_search_and_order(page: Browser) -> None:
    def put(name: str, value: object) -> int:
        page.value(
            f"form[{json.dumps(name)}].value = {json.dumps(value)},"
            f" form[{json.dumps(name)}].dispatchEvent(new Event('input', {{bubbles: true}}))"
        )
        return len(page.value(TITLES))

    assert put("step", "2") == 12 and put("which", "called a tool") == 6 and put("which", "a call failed") == 1
    assert put("step", "") == 3 and put("which", "all") == 36
    assert put("words", "CASE 4") == 3 and put("words", "sorter") == 18 and put("words", "nothing has this") == 0
    assert "No sample fits" in page.value(SHOWN)
    assert put("words", "") == 36 and put("low", "0.2") == 12 and put("high", "0.25") == 6
    put("low", ""), put("high", "")
    put("order", "highest score")
    scores = page.value("fitting.map(one => one.score)")
    known = [score for score in scores if score is not None]
    assert known == sorted(known, reverse=True) and scores[: len(known)] == known
    put("order", "least likely")
    likely = page.value("fitting.map(one => one.likely).filter(one => one !== null)")
    assert likely == sorted(likely)


def test_before_and_after_of_a_prompt(page: Browser) -> None:
    page.value(f"choose(samples.find(one => one.prompt === {json.dumps(PROMPTS[2])} && one.step === 2))")
    assert "3 answers to this prompt" in page.value(SHOWN)
    page.click("#compare")
    page.until("document.querySelectorAll('.pane').length === 2")
    panes = page.value("[...document.querySelectorAll('.pane')].map(node => node.innerText)")
    assert "1 (training)" in panes[0] and "3 (training)" in panes[1]
    where = page.value("location.hash")
    page.open(Path(page.value("decodeURIComponent(location.pathname)")), where)  # an address is a view
    page.until("document.querySelectorAll('.pane').length === 2")


def test_the_keyboard_is_enough(page: Browser) -> None:
    page.value("document.activeElement.blur()")
    page.press("/")
    assert page.value("document.activeElement.name") == "words"
    page.type("case 3")
    page.until("fitting.length === 3")
    page.value("list.focus()")
    for key, at in (("ArrowDown", 1), ("End", 2), ("ArrowUp", 1), ("Home", 0)):
        page.press(key)
        assert page.value("fitting.indexOf(current)") == at
        chosen = page.value("[...document.querySelectorAll('#list [aria-selected=true]')].map(node => node.id)")
        assert chosen == [page.value("list.getAttribute('aria-activedescendant')")]
    page.press("c")
    assert page.value("form.colour.value") == "advantage"
    page.value("document.querySelector('.tokens').focus()")
    for key in ("ArrowRight", "ArrowRight", "ArrowLeft", "End"):
        page.press(key)
    told = page.value("token.textContent")
    for part in ('"call"', "token 1, id 11", "log-prob -0.25", "probability 0.7788", "advantage 1.5", "reward 0.125"):
        assert part in told
    reached = (
        "[...document.querySelectorAll('main button, main summary, main [tabindex]')].every(one => one.tabIndex === 0)"
    )
    assert page.value(reached)


def test_light_and_dark(page: Browser) -> None:
    colour = "(name => getComputedStyle(document.body)[name])"
    page.dark(False)
    light = [page.value(f"{colour}({name!r})") for name in ("color", "backgroundColor")]
    page.dark(True)
    dark = [page.value(f"{colour}({name!r})") for name in ("color", "backgroundColor")]
    page.dark(False)
    brightness = [sum(json.loads(f"[{one[4:-1]}]")) for one in (*light, *dark)]
    assert brightness[0] < 200 < 700 < brightness[1] and brightness[3] < 100 < 600 < brightness[2]


def test_thousands_of_samples_are_bounded_and_the_page_says_so(browser: Browser, tmp_path: Path) -> None:
    with Tracking([], "p", "e", tmp_path) as tracking:
        tracking.log({"critic/score/mean": 0.5}, 1)
    prompts = [f"prompt {number // 4}" for number in range(4000)]
    words = [f"w{place} " for place in range(60)]
    for step in range(1, 31):
        rows = [{"tokens": tokens(step, words, [1] * 60)} if number < 200 else {} for number in range(len(prompts))]
        if step in (1, 9, 10, 30):
            texts = ["x" * 100] * len(prompts)
            dump_generations(tmp_path / "rollouts", step, prompts, texts, [0.5] * len(prompts), extra={"rollout": rows})
        else:
            dump_generations(tmp_path / "rollouts", step, prompts[:8], ["y"] * 8, [0.1] * 8)
    history = load_history(tmp_path)
    data = select_samples(history, 2000)
    assert len(data["dumps"]) == 24 and data["dumps"][0]["step"] == 1 and data["dumps"][-1]["step"] == 30
    assert sum(len(dump["samples"]) for dump in data["dumps"]) <= 2000
    first, last = ({sample["prompt"] for sample in data["dumps"][place]["samples"]} for place in (0, -1))
    assert first == last and len(first) > 10  # before and after
    whole = [[sample["prompt"] for sample in dump["samples"]] for dump in data["dumps"]]
    assert all(one.count(prompt) == 4 for one in whole for prompt in set(one))  # groups are whole
    many = select_samples(history, 100_000)
    assert sum(len(dump["samples"]) for dump in many["dumps"]) > 8000
    path = write_rollouts(history)
    assert path is not None and path.stat().st_size < 3_000_000
    browser.open(path)
    notes = browser.value("document.getElementById('notes').textContent")
    assert "24 of 30 steps" in notes and "samples of these steps" in notes and "have text alone" in notes
    count, total = browser.value("document.querySelectorAll('#list li').length"), browser.value("samples.length")
    assert count == 200 < total
    browser.click("#more")
    assert browser.value("document.querySelectorAll('#list li').length") == min(400, total)
    assert select_samples(history, 0)["dumps"] == []


def test_long_samples_lose_their_middle_and_say_so(browser: Browser, tmp_path: Path) -> None:
    with Tracking([], "p", "e", tmp_path) as tracking:
        tracking.log({"critic/score/mean": 0.5}, 1)
    words = [f"w{place} " for place in range(20_000)]
    long = {"tokens": tokens(1, words, [1] * 20_000)}
    dump_generations(tmp_path / "rollouts", 1, ["p"], ["x" * 100_000], [0.5], extra={"rollout": [long]})
    path = write_rollouts(load_history(tmp_path))
    assert path is not None
    browser.open(path)
    shown = browser.value(SHOWN)
    assert (
        "12000 tokens are left out here" in shown and "w3999 " in shown and "w16000 " in shown and "w4000 " not in shown
    )
    assert "the middle of 1 long samples is left out" in browser.value("document.getElementById('notes').textContent")
    browser.value("document.querySelectorAll('.tokens')[1].lastChild.click()")
    assert "reward 0.1" in browser.value("token.textContent")  # places behind the gap are right


def test_without_samples_there_is_no_page(tmp_path: Path) -> None:
    with Tracking([], "p", "e", tmp_path) as tracking:
        tracking.log({"critic/score/mean": 0.5}, 1)
    (tmp_path / ROLLOUTS).write_text("of an earlier run")
    page = write_report(tmp_path).read_text()
    assert not (tmp_path / ROLLOUTS).exists() and "rollouts.html" not in page
