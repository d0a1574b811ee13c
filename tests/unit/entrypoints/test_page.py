"""The files of the page: which there are, with which headers, and what they may load."""

from __future__ import annotations

import re
from importlib import resources

import pytest

from engine.entrypoints.asgi import Message, send_response
from engine.entrypoints.page.files import load, page_routes, respond
from engine.entrypoints.routes.routing import Access, Match, Router

TABLE = load()
STATIC = resources.files("engine.entrypoints.page") / "static"


def headers_of(path: str, if_none_match: str | None = None) -> tuple[int, bytes, dict[str, str]]:
    """Status, body and own headers of the answer to a GET."""
    sent = [] if if_none_match is None else [(b"if-none-match", if_none_match.encode())]
    response = respond(TABLE[path], {"headers": sent})
    headers = {name.decode(): value.decode() for name, value in response.headers}
    return response.status, response.body, headers


def text_of(path: str) -> str:
    return TABLE[path].content.decode()


def test_every_file_has_one_path() -> None:
    names = {entry.name for entry in STATIC.iterdir()}
    assert {"/"} | {f"/page/{name}" for name in names - {"index.html"}} == set(TABLE)


@pytest.mark.parametrize(
    ("path", "content_type"),
    [
        ("/", b"text/html; charset=utf-8"),
        ("/page/main.js", b"text/javascript; charset=utf-8"),
        ("/page/base.css", b"text/css; charset=utf-8"),
        ("/page/icon.svg", b"image/svg+xml"),
    ],
)
def test_file_is_answered_whole_with_its_type(path: str, content_type: bytes) -> None:
    status, body, _ = headers_of(path)
    name = path.rpartition("/")[2] or "index.html"
    assert (status, body) == (200, (STATIC / name).read_bytes())
    assert TABLE[path].content_type == content_type


@pytest.mark.parametrize("path", TABLE)
def test_headers_forbid_everything_foreign(path: str) -> None:
    headers = headers_of(path)[2]
    policy = dict(
        part.strip().split(" ", 1) for part in headers["content-security-policy"].split(";")
    )
    assert policy["default-src"] == "'none'"
    for kind in ("script-src", "style-src", "img-src", "connect-src"):
        assert policy[kind] == "'self'"
    assert policy["frame-ancestors"] == "'none'"
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["cache-control"] == "no-cache"


@pytest.mark.parametrize("form", ["{}", "W/{}", '"other", {}', "*"])
def test_known_etag_is_answered_304_without_a_body(form: str) -> None:
    etag = headers_of("/")[2]["etag"]
    status, body, headers = headers_of("/", form.format(etag))
    assert (status, body) == (304, b"")
    assert headers["etag"] == etag


async def test_304_announces_no_length() -> None:
    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    for etag in ("*", '"other"'):
        scope = {"headers": [(b"if-none-match", etag.encode())]}
        await send_response(send, respond(TABLE["/"], scope), "id")
    names = [[name for name, _ in start["headers"]] for start in sent[::2]]
    assert [b"content-length" in each for each in names] == [False, True]
    assert [body["body"] for body in sent[1::2]] == [b"", TABLE["/"].content]


@pytest.mark.parametrize("sent", ['"other"', "", "nonsense"])
def test_other_etag_is_answered_whole(sent: str) -> None:
    assert headers_of("/", sent)[0] == 200


def test_etags_are_strong_and_differ() -> None:
    etags = [file.etag for file in TABLE.values()]
    assert all(re.fullmatch(r'"[0-9a-f]{32}"', etag) for etag in etags)
    assert len(set(etags)) == len(etags)


@pytest.mark.parametrize(
    "path",
    ["/page", "/page/", "/page/index.html", "/page/nope.js", "/page/../files.py",
     "/page/..%2ffiles.py", "/page/static/main.js", "//", "/page/main.js/"],
)  # fmt: skip
def test_unknown_file_has_no_route(path: str) -> None:
    assert Router(page_routes()).find("GET", path) == []


def test_page_is_open_and_read_only() -> None:
    assert {route.access for route in page_routes()} == {Access.OPEN}
    router = Router(page_routes())
    assert isinstance(router.find("HEAD", "/page/main.js"), Match)
    assert router.find("POST", "/") == ["GET", "HEAD"]


@pytest.mark.parametrize("path", TABLE)
def test_what_a_file_refers_to_is_a_file_of_the_page(path: str) -> None:
    text = text_of(path)
    if path == "/":
        referred = [f"/{name}" for name in re.findall(r'(?:src|href)="(page/[^"]+)"', text)]
        assert len(referred) >= 4
    else:
        referred = [f"/page/{name}" for name in re.findall(r'from "\./([^"]+)"', text)]
    assert set(referred) <= set(TABLE)


@pytest.mark.parametrize("path", TABLE)
def test_no_file_names_another_server(path: str) -> None:
    addresses = set(re.findall(r"https?://[^\s\"')]+", text_of(path)))
    assert addresses <= {"http://www.w3.org/2000/svg"}  # the name of a format, not a place


def test_markup_has_nothing_that_the_policy_forbids() -> None:
    html = text_of("/")
    assert not re.search(r"\sstyle=|<style|\son\w+=|javascript:", html)
    assert re.findall(r"<script[^>]*>", html) == ['<script type="module" src="page/main.js">']
    scripts = "".join(text_of(path) for path in TABLE if path.endswith(".js"))
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|eval\(|document\.write", scripts)
