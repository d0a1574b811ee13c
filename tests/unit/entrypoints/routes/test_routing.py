"""Which route a method and a path lead to."""

import pytest

from engine.entrypoints.routes.routing import Match, Route, Router
from engine.errors import InvalidRequest
from engine.request_builder import user_id_text


async def handler(exchange):
    raise AssertionError("no request is answered here")


def route(name, method, path):
    return Route(name, method, path, handler)


ROUTER = Router(
    [
        route("users", "GET", "/v1/users"),
        route("prefetch", "POST", "/v1/users:prefetch"),
        route("user", "GET", "/v1/users/{user_id}"),
        route("forget", "DELETE", "/v1/users/{user_id}"),
        route("infer", "POST", "/v2/models/{model}/versions/{version}/infer"),
        route("trim", "POST", "/v1/things/{name}:trim"),
    ]
)


@pytest.mark.parametrize(
    ("method", "path", "name", "params"),
    [
        ("GET", "/v1/users", "users", {}),
        ("HEAD", "/v1/users", "users", {}),
        ("POST", "/v1/users:prefetch", "prefetch", {}),
        ("GET", "/v1/users/u%2F1", "user", {"user_id": "u/1"}),
        ("DELETE", "/v1/users/7", "forget", {"user_id": "7"}),
        ("POST", "/v2/models/m/versions/3/infer", "infer", {"model": "m", "version": "3"}),
        ("POST", "/v1/things/a:b:trim", "trim", {"name": "a:b"}),
    ],
)
def test_path_leads_to_route(method, path, name, params):
    found = ROUTER.find(method, path)
    assert isinstance(found, Match)
    assert (found.route.name, found.params) == (name, params)


@pytest.mark.parametrize("segment", ["%FF", "a%C3", "%ED%A0%80"])
def test_an_id_that_is_no_utf8_is_nobodys(segment):
    found = ROUTER.find("DELETE", f"/v1/users/{segment}")
    assert isinstance(found, Match)
    with pytest.raises(InvalidRequest, match="user_id is no valid Unicode text"):
        user_id_text(found.params["user_id"])


@pytest.mark.parametrize(
    "path", ["/v1/user", "/v1/users/", "/v1/users/a/b", "/v1/things/:trim", "/v1/things/a"]
)
def test_unknown_path_allows_nothing(path):
    assert ROUTER.find("GET", path) == []


def test_wrong_method_tells_the_allowed_ones():
    assert ROUTER.find("PUT", "/v1/users/7") == ["GET", "HEAD", "DELETE"]
    assert ROUTER.find("GET", "/v1/users:prefetch") == ["POST"]


def test_two_routes_of_one_path_and_method_are_refused():
    with pytest.raises(ValueError, match="two routes for GET /a"):
        Router([route("a", "GET", "/a"), route("b", "GET", "/a")])
