"""The page at `/` in a headless Chromium, against real server processes."""

from __future__ import annotations

import json
import math
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from browser import chromium, require_chromium

from tests.integration.server_process import ServerProcess

CHROMIUM = require_chromium()

from playwright.sync_api import expect  # noqa: E402

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page, Route

SERVER_FLAGS = ["--page-size", "8", "--chunk-size", "32", "--device-pages", "512"]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium(CHROMIUM) as running:
        yield running


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """The built-in model."""
    with ServerProcess(tmp_path_factory.mktemp("page"), *SERVER_FLAGS) as running:
        yield running.until_ready()


@pytest.fixture(scope="module")
def featured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """The fake core: a model with an action, a vector feature, a context and two tasks."""
    with ServerProcess(tmp_path_factory.mktemp("featured"), fake=True) as running:
        yield running.until_ready()


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    context.set_default_timeout(30_000)
    yield context.new_page()
    context.close()


def visit(page: Page, server: ServerProcess) -> None:
    """Open the page, ask as often as it can, and wait until the form is there."""
    page.goto(f"http://{server.address}/")
    page.select_option("#interval", "1000")
    expect(page.locator("#phase")).to_have_text("serving")
    expect(page.get_by_role("button", name="Rank")).to_be_visible()


def field(page: Page, name: str) -> Any:
    return page.locator(f'[data-name="{name}"]')


def fill_with_a_sample(page: Page) -> None:
    page.get_by_role("button", name="Fill with a sample").click()
    expect(field(page, "history.item")).not_to_have_value("")


def ask(page: Page, answer: str, button: str = "Rank") -> None:
    """Send the form and wait for an answer whose summary says so."""
    page.get_by_role("button", name=button, exact=True).click()
    expect(page.locator("#answer .summary")).to_contain_text(answer)


def shown_scores(page: Page) -> list[tuple[int, float]]:
    rows = page.locator("#answer tbody tr").all()
    cells = [row.locator("td").all_text_contents() for row in rows]
    return [(int(row[1]), float(row[3].replace(",", ""))) for row in cells]


def ids(text: str) -> list[int]:
    return [int(token) for token in text.split()]


def test_page_loads_without_errors_and_asks_no_other_server(
    page: Page, server: ServerProcess
) -> None:
    asked: list[str] = []
    errors: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on(
        "console",
        lambda message: (
            errors.append(message.text) if message.type in ("error", "warning") else None
        ),
    )
    visit(page, server)
    polls_before = len([url for url in asked if url.endswith("/v1/metrics.json")])
    page.wait_for_event("response", lambda answer: answer.url.endswith("/v1/metrics.json"))
    page.wait_for_event("response", lambda answer: answer.url.endswith("/v1/metrics.json"))
    assert len([url for url in asked if url.endswith("/v1/metrics.json")]) >= polls_before + 2
    assert errors == []
    assert all(url.startswith(f"http://{server.address}/") for url in asked)
    assert any(url.endswith("/page/icon.svg") for url in asked)


def test_numbers_follow_the_traffic(page: Page, server: ServerProcess) -> None:
    visit(page, server)
    expect(page.locator("#random")).to_be_visible()
    expect(page.locator("#model")).to_contain_text("builtin-hstu")
    tokens_before = server.get("/v1/status").body["device_pages_used"] * 8
    history = list(range(64))
    for last in (500, 501):
        body = {"user_id": "traffic", "history": [*history, last], "candidates": [1, 2]}
        assert server.post("/v1/rank", body).status == 200
    device = page.locator('#tiers [data-tier="device"]')
    # 65 tokens of a user that was not there lie in 9 pages of 8.
    expect(device.locator(".note").nth(1)).to_contain_text(f"{tokens_before + 72} of 4,096 tokens")
    used = server.get("/v1/status").body["device_pages_used"]
    expect(device.locator(".value")).to_have_text(str(used))
    # The second request found 64 of its 65 tokens.
    recent = page.locator('#hits [data-when="recent"] [data-source="device"] strong')
    expect(recent).not_to_have_text("0 %")
    page.locator("#users-refresh").click()
    expect(page.locator("#users tbody tr").first).to_contain_text("traffic")
    expect(page.locator("#latency tbody tr").first).to_contain_text("ms")
    expect(page.locator("#load .legend").first).to_contain_text("rank")


def test_form_ranks_and_the_grown_history_hits(page: Page, server: ServerProcess) -> None:
    visit(page, server)
    fill_with_a_sample(page)
    history = ids(field(page, "history.item").input_value())
    candidates = ids(field(page, "candidates.item").input_value())
    assert (len(history), len(candidates)) == (24, 16)
    ask(page, "16 scores")
    expect(page.locator("#answer .summary")).to_contain_text("0 of 24 history tokens")
    body = {"user_id": "someone else", "history": history, "candidates": candidates}
    scores = [row[0] for row in server.post("/v1/rank", body).body["scores"]]
    best_first = sorted(zip(candidates, scores, strict=True), key=lambda pair: -pair[1])
    shown = shown_scores(page)
    assert [item for item, _ in shown] == [item for item, _ in best_first]
    assert [score for _, score in shown] == pytest.approx([s for _, s in best_first], abs=5e-5)

    page.get_by_role("button", name=f"Append item {shown[0][0]} to the history").click()
    assert ids(field(page, "history.item").input_value()) == [*history, shown[0][0]]
    ask(page, "24 of 25 history tokens were there already")
    expect(page.locator('#answer [data-source="device"] strong')).to_have_text("24")
    expect(page.locator('#answer [data-source="computed"] strong')).to_have_text("1")
    expect(page.locator("#answer .past")).to_have_count(1)
    expect(page.locator("#answer .past")).to_contain_text("computed 24")


def test_form_retrieves(page: Page, server: ServerProcess) -> None:
    visit(page, server)
    fill_with_a_sample(page)
    field(page, "task").select_option("retrieve")
    expect(field(page, "candidates.item")).to_be_hidden()
    field(page, "topk").fill("5")
    ask(page, "5 scores", "Retrieve")
    scores = [score for _, score in shown_scores(page)]
    assert scores == sorted(scores, reverse=True)


def test_form_follows_what_the_model_declares(page: Page, featured: ServerProcess) -> None:
    visit(page, featured)
    fill_with_a_sample(page)
    expect(field(page, "history.action")).to_have_value("1 1 1 1 1")
    expect(field(page, "history.mood")).to_have_value("\n".join(["0.0 0.0"] * 5))
    expect(field(page, "candidates.mood")).to_have_value("\n".join(["0.0 0.0"] * 3))
    field(page, "context.country").fill("49")
    field(page, "next.item").fill("7")
    field(page, "next.action").fill("3")
    field(page, "next.mood").fill("0.5 1.5")
    page.get_by_role("button", name="Append event").click()
    expect(field(page, "history.action")).to_have_value("1 1 1 1 1 3")
    history = ids(field(page, "history.item").input_value())
    candidates = ids(field(page, "candidates.item").input_value())
    with page.expect_request("**/v1/rank") as sent:
        ask(page, "3 scores")
    assert json.loads(sent.value.post_data or "") == {
        "user_id": field(page, "user_id").input_value(),
        "namespace": "",
        "cache": "use",
        "history": {
            "item": history,
            "action": [1, 1, 1, 1, 1, 3],
            "mood": [*[[0, 0]] * 5, [0.5, 1.5]],
        },
        "candidates": {"item": candidates, "mood": [[0, 0]] * 3},
        "context": [49],
    }
    expect(page.locator("#answer th")).to_have_text(["#", "item", "", "click", "like", ""])
    # The fake core scores a candidate with the sum of the history's items * 1000 + its id.
    assert shown_scores(page)[0] == (max(candidates), sum(history) * 1000 + max(candidates))


def test_ids_beyond_the_safe_integers_keep_their_digits(
    page: Page, featured: ServerProcess
) -> None:
    visit(page, featured)
    fill_with_a_sample(page)
    field(page, "candidates.item").fill("9007199254740993 2 3")
    with page.expect_request("**/v1/rank") as sent:
        ask(page, "3 scores")
    assert '"item":[9007199254740993,2,3]' in (sent.value.post_data or "")
    expect(page.locator("#answer tbody tr").first).to_contain_text("9007199254740993")


def test_wrong_input_is_named_by_the_page_or_by_the_server(
    page: Page, server: ServerProcess
) -> None:
    visit(page, server)
    fill_with_a_sample(page)
    field(page, "candidates.item").fill("1 two 3")
    page.get_by_role("button", name="Rank", exact=True).click()
    alert = page.locator("#answer [role=alert]")
    expect(alert).to_contain_text('candidates.item: "two" is not an integer')
    expect(field(page, "candidates.item")).to_be_focused()
    field(page, "candidates.item").fill("1 3")
    field(page, "topk").fill("-4")
    page.get_by_role("button", name="Rank", exact=True).click()
    expect(alert).to_contain_text("topk is -4")
    expect(alert.locator("dd").nth(0)).to_have_text("400")
    expect(alert.locator("dd").nth(1)).to_have_text("invalid_request")
    expect(alert.locator("dd").nth(2)).to_have_text("1")  # the limit
    field(page, "topk").fill("")
    ask(page, "2 scores")
    expect(alert).to_have_count(0)


@pytest.mark.parametrize("path", ["plain", "answered"])
def test_phone_has_no_sideways_scroll(page: Page, server: ServerProcess, path: str) -> None:
    page.set_viewport_size({"width": 390, "height": 844})
    visit(page, server)
    if path == "answered":
        fill_with_a_sample(page)
        ask(page, "16 scores")
    width = page.evaluate("document.documentElement.scrollWidth")
    assert width <= 390


@pytest.mark.parametrize(
    ("scheme", "ground"), [("light", "rgb(244, 245, 247)"), ("dark", "rgb(18, 22, 27)")]
)
def test_colours_follow_the_system(
    page: Page, server: ServerProcess, scheme: Any, ground: str
) -> None:
    page.emulate_media(color_scheme=scheme)
    visit(page, server)
    expect(page.locator("body")).to_have_css("background-color", ground)


def test_hidden_tab_asks_nothing_until_it_is_seen_again(
    page: Page, featured: ServerProcess
) -> None:
    def hide(hidden: bool) -> None:
        page.evaluate(
            """(hidden) => {
                Object.defineProperty(document, "hidden", { value: hidden, configurable: true });
                document.dispatchEvent(new Event("visibilitychange"));
            }""",
            hidden,
        )

    asked: list[str] = []
    page.clock.install()
    page.on("request", lambda request: asked.append(request.url))
    visit(page, featured)
    hide(True)
    expect(page.locator("#age")).to_contain_text("paused")
    before = sum(url.endswith("/v1/metrics.json") for url in asked)
    page.clock.run_for(60_000)
    assert sum(url.endswith("/v1/metrics.json") for url in asked) == before
    with page.expect_request("**/v1/metrics.json"):
        hide(False)


def test_snapshots_give_rises_quantiles_and_restarts(page: Page, featured: ServerProcess) -> None:
    page.goto(f"http://{featured.address}/")
    found = page.evaluate(
        """async () => {
            const { Samples, quantile } = await import("/page/samples.js");
            const answer = (requests, counts, pages) => [
                { name: "mtserve_requests_total", kind: "counter", labels: { task: "rank" },
                  value: requests, buckets: [], bucket_counts: [] },
                { name: "mtserve_pages", kind: "gauge", labels: {}, value: pages, buckets: [],
                  bucket_counts: [] },
                { name: "mtserve_seconds", kind: "histogram", labels: {}, value: 0,
                  buckets: [0.1, 0.2], bucket_counts: counts },
            ];
            const samples = new Samples();
            const restarts = [
                samples.add(answer(10, [0, 0, 0], 9), 100),
                samples.add(answer(30, [2, 2, 0], 5), 110),
                samples.add(answer(50, [10, 2, 1], 7), 120),
            ];
            const [all, last] = [samples.recent(60), samples.recent(10)];
            const seconds = all.histogram("seconds");
            const result = {
                rises: [all.rise("requests_total", { task: "rank" }), last.rise("requests_total",
                    { task: "rank" }), all.rise("requests_total", { task: "retrieve" })],
                rates: samples.rate(60, (span) => span.rate("requests_total", { task: "rank" }))
                    .map((point) => point.value),
                counts: last.histogram("seconds").counts,
                quantiles: [0.5, 0.8, 0.99].map((q) => quantile(seconds, q)),
                nothing: quantile({ edges: [1], counts: [0, 0] }, 0.5),
            };
            restarts.push(samples.add(answer(4, [0, 0, 0], 0), 130));
            result.restarts = restarts;
            result.afterRestart = samples.recent(60).lengthS;
            result.gap = samples.rate(60, (span) => span.rise("requests_total", { task: "rank" }))
                .at(-1).value;
            return result;
        }"""
    )
    assert found == {
        "rises": [40, 20, 0],
        "rates": [2, 2],
        "counts": [8, 0, 1],
        # 13 observations: the 6.5th is 0.65 into the first bucket, the 10.4th 0.2 into the second.
        "quantiles": pytest.approx([0.065, 0.12, math.inf]),
        "nothing": None,
        "restarts": [False, False, False, True],
        "afterRestart": 0,
        "gap": None,
    }


def test_page_survives_a_restart_and_says_so(page: Page, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = str(probe.getsockname()[1])
    flags = ["--port", port]
    with ServerProcess(tmp_path, *flags, fake=True) as first:
        visit(page, first.until_ready())
    expect(page.locator("#phase")).to_have_text("unreachable")
    expect(page.locator("#trouble")).to_contain_text("The server cannot be reached.")
    with ServerProcess(tmp_path, *flags, fake=True) as second:
        second.until_ready()
        expect(page.locator("#phase")).to_have_text("serving")
        expect(page.locator("#trouble")).to_be_hidden()
        expect(page.locator("#restart")).to_contain_text("The server was restarted")


def test_key_is_asked_for_and_kept_for_the_tab(page: Page, featured: ServerProcess) -> None:
    def guard(route: Route) -> None:
        if route.request.headers.get("authorization") == "Bearer secret":
            route.continue_()
        else:
            route.fulfill(status=401, json={"error": "no key", "code": "unauthorized"})

    page.route("**/v1/status", guard)
    page.goto(f"http://{featured.address}/")
    form = page.locator("#key-form")
    expect(form).to_be_visible()
    form.locator("input").fill("wrong")
    form.get_by_role("button").click()
    expect(form).to_contain_text("refused that key")
    form.locator("input").fill("secret")
    form.get_by_role("button").click()
    expect(page.locator("#phase")).to_have_text("serving")
    expect(form).to_be_hidden()
    assert page.evaluate("[localStorage.length, document.cookie]") == [0, ""]
    page.reload()
    expect(page.locator("#phase")).to_have_text("serving")
    expect(form).to_be_hidden()


def test_versions_are_listed_once_there_are_two(page: Page, featured: ServerProcess) -> None:
    visit(page, featured)
    expect(page.locator("#versions")).to_be_hidden()
    status = featured.get("/v1/status").body | {"weights_versions": ["7", "8"]}
    held = {"requests": 3, "users": 20, "pages": 150, "chunks": 32, "load_s": 1, "warm_up_s": 1}
    listed = [
        {"version": "7", "state": "active", "catalogue_version": "1", "share": 0.75, "canary": 0},
        {"version": "8", "state": "standby", "catalogue_version": "2", "share": 0.25, "canary": 0},
    ]
    answer = {"active": "7", "versions": [each | held for each in listed]}
    page.route("**/v1/weights:list", lambda route: route.fulfill(json=answer))
    page.route("**/v1/status", lambda route: route.fulfill(json=status))
    rows = page.locator("#versions tbody tr")
    expect(rows).to_have_count(2)
    expect(rows.nth(1).locator("td")).to_have_text(
        ["8", "standby", "2", "25.0 %", "0 %", "3", "20", "150", "32"]
    )


USERS = {
    "states": [
        {
            "namespace": "shop", "user_id": "<b>u1</b>", "weights_version": "7",
            "device_tokens": 1200, "host_tokens": 1000, "pages": 150, "chunks": 32,
            "residency": "device", "length": 1200, "idle_s": 2.5, "fingerprint": "00ff",
        },
    ],
    "total": 41,
}  # fmt: skip


def test_users_are_listed_by_tier(page: Page, featured: ServerProcess) -> None:
    page.route("**/v1/users*", lambda route: route.fulfill(json=USERS))
    visit(page, featured)
    row = page.locator("#users tbody tr")
    expect(row.locator("td")).to_have_text(
        ["<b>u1</b>", "shop", "7", "", "1,200", "1,000", "150", "32", "2 s ago"]
    )
    expect(page.locator("#users .note")).to_have_text("1 of 41 states, the last used first")
    with page.expect_request("**/v1/users?limit=100&tier=host"):
        page.locator("#users-tier").select_option("host")


@pytest.mark.parametrize(
    ("status", "says"),
    [(404, "has no list of users"), (401, "needs an API key"), (403, "may not list users")],
)
def test_users_that_cannot_be_listed_are_said_so(
    page: Page, featured: ServerProcess, status: int, says: str
) -> None:
    refusal = {"error": "no", "code": "refused"}
    page.route("**/v1/users*", lambda route: route.fulfill(status=status, json=refusal))
    visit(page, featured)
    expect(page.locator("#users .body")).to_contain_text(says)
