"""Weights versions beside each other: which one a request takes, and what a change does to it.

The fake device writes other numbers for other versions, so an answer that mixes two is wrong.
"""

import pytest
from core_harness import CoreUnderTest, events

from engine.commands import (
    ActivateWeights,
    DescribeUser,
    ForgetUser,
    ListUsers,
    ListWeights,
    LoadCatalogue,
    LoadWeights,
    ResetCache,
    RetireWeights,
)
from engine.config import WeightsConfig
from engine.errors import ConfigError


def core_with_two(**options):
    core = CoreUnderTest(**options)
    core.load("2")
    return core


def version_of(core, request_id):
    return core.response(request_id).usage.weights_version


def list_of(core):
    core.command("list", ListWeights())
    listed = core.replies.pop("list").result
    return {status.version: status for status in listed.versions}


# Loading


def test_requests_go_on_while_a_version_is_loaded():
    core = CoreUnderTest()
    core.command("load", LoadWeights(path="2"))
    assert version_of(core, core_served(core, "ann")) == "1"
    assert core.result("load") is None and not core.core.is_idle
    core.loader.end(core.served_model("2"))
    core.step()
    status = core.result("load").status
    assert (status.version, status.state, status.share) == ("2", "standby", 0.5)
    assert [info.weights_version for info in core.announced[-1].infos] == ["1", "2"]
    assert core.value("weights_changes_total", "loaded") == 1


def core_served(core, user, length=8, **options):
    request_id = core.rank(user, length, **options)
    core.settle()
    return request_id


def test_load_that_fails_leaves_everything_as_it_was():
    core = CoreUnderTest()
    core.command("load", LoadWeights(path="broken"))
    core.loader.end(ConfigError("no config.json"))
    core.step()
    assert core.replies["load"].error.message == "no config.json"
    assert list(list_of(core)) == ["1"]
    assert core.value("weights_changes_total", "load_failed") == 1
    assert version_of(core, core_served(core, "ann")) == "1"


@pytest.mark.parametrize(
    ("command", "part"),
    [
        (LoadWeights(path="x", share=0.0), "share is 0.0"),
        (LoadWeights(path="x", share=1.0), "share is 1.0"),
        (LoadWeights(path="x", canary=1.5), "canary is 1.5"),
        (LoadWeights(path="x", version="1"), "loaded already"),
        (ActivateWeights(version="9"), "'9' is not loaded"),
        (ActivateWeights(version="1", budget_s=-1.0), "budget_s is -1.0"),
        (RetireWeights(version="9"), "'9' is not loaded"),
        (RetireWeights(version="1"), "activate another one first"),
        (LoadCatalogue(path="x", version="9"), "'9' is not loaded"),
    ],
)
def test_command_that_cannot_work_names_what_is_wrong(command, part):
    core = CoreUnderTest()
    core.command("c", command)
    assert part in core.replies["c"].error.message
    assert core.loader.running is None


def test_no_more_versions_than_allowed():
    core = core_with_two()
    core.command("third", LoadWeights(path="3"))
    error = core.replies["third"].error
    assert "max_weights_versions=2" in error.message
    assert (error.limit, error.value) == (2, 2)


def test_pool_without_a_page_for_each_version_takes_no_more_of_them():
    core = CoreUnderTest(pages=1, tiers="device")
    core.command("second", LoadWeights(path="2"))
    assert "device_pages=1" in core.replies["second"].error.message
    assert core.loader.running is None


@pytest.mark.parametrize(("other", "part"), [("3", "max_weights_versions=2"), ("2", "already")])
def test_load_that_ends_after_another_took_its_place_fails(other, part):
    core = CoreUnderTest()
    core.core.run("first", LoadWeights(path="a"))
    core.loader.end(core.served_model("2"))  # the core has not looked yet
    core.core.run("second", LoadWeights(path="b"))
    core.loader.end(core.served_model(other))
    core.step()
    assert core.result("first").status.version == "2"
    assert part in core.replies["second"].error.message
    assert list(list_of(core)) == ["1", "2"]


def test_shares_always_add_up_to_one():
    core = CoreUnderTest(weights=WeightsConfig(max_weights_versions=3))
    core.load("2", share=0.25)
    core.load("3", share=0.5)
    shares = {name: status.share for name, status in list_of(core).items()}
    assert shares == {"1": 0.375, "2": 0.125, "3": 0.5}
    core.command("retire", RetireWeights(version="3"))
    core.step()
    shares = {name: status.share for name, status in list_of(core).items()}
    assert shares == {"1": 0.75, "2": 0.25}


def test_version_with_next_to_no_share_gets_all_of_it_when_it_is_alone():
    core = CoreUnderTest()
    core.load("2", share=1e-17)
    core.command("switch", ActivateWeights(version="2"))
    core.command("retire", RetireWeights(version="1"))
    core.step()
    assert core.result("retire").version == "1"
    assert list_of(core)["2"].share == 1.0


# Which version a request takes


def test_request_takes_the_active_version_or_the_one_it_names():
    core = core_with_two()
    assert version_of(core, core_served(core, "ann")) == "1"
    assert version_of(core, core_served(core, "ann", weights_version="2")) == "2"
    core.command("switch", ActivateWeights(version="2"))
    assert version_of(core, core_served(core, "ann")) == "2"
    assert version_of(core, core_served(core, "ann", weights_version="1")) == "1"


def test_unknown_version_is_refused():
    core = core_with_two()
    error = core.error(core.rank("ann", 8, weights_version="3"))
    assert error.code == "unknown_model" and "'1', '2'" in error.message


def test_canary_leads_the_same_users_to_the_new_version_every_time():
    core = CoreUnderTest(pages=256)
    core.load("2", canary=0.5)
    users = [f"u{number}" for number in range(40)]
    first = [version_of(core, core_served(core, user, 2)) for user in users]
    again = [version_of(core, core_served(core, user, 2)) for user in users]
    assert first == again
    assert 10 <= first.count("2") <= 30
    core.command("switch", ActivateWeights(version="2"))
    assert version_of(core, core_served(core, users[first.index("1")], 2)) == "2"


def test_versions_never_share_state():
    core = core_with_two()
    core_served(core, "ann", 16)
    first = core_served(core, "ann", 16, weights_version="2")
    assert core.hits(first) == (0, 0, 16)
    second = core_served(core, "ann", 16, weights_version="2")
    assert core.hits(second) == (16, 0, 0)
    third = core_served(core, "ann", 16, weights_version="1")
    assert core.hits(third) == (16, 0, 0)


def test_step_runs_one_version():
    core = core_with_two()
    for user in ("ann", "bob", "cid"):
        core.rank(user, 8)
        core.rank(user, 8, weights_version="2")
    core.settle()
    assert {step.version for step in core.runner.steps} == {"1", "2"}
    assert sum(len(step.works) for step in core.runner.steps) == 6
    assert len(core.outcomes) == 6


def test_request_keeps_its_version_when_another_becomes_active():
    core = core_with_two(max_batch_tokens=8)
    request_id = core.rank("ann", 20)
    core.steps()
    core.command("switch", ActivateWeights(version="2"))
    core.settle()
    assert version_of(core, request_id) == "1"


# Activating


def test_roll_back_finds_the_old_state():
    core = core_with_two()
    core_served(core, "ann", 16)
    core.command("switch", ActivateWeights(version="2"))
    assert core.hits(core_served(core, "ann", 16)) == (0, 0, 16)
    core.command("back", ActivateWeights(version="1"))
    assert core.result("back").previous == "2"
    assert core.hits(core_served(core, "ann", 16)) == (16, 0, 0)


def test_drop_policy_removes_the_old_state_at_once():
    core = core_with_two()
    core_served(core, "ann", 16)
    core.command("switch", ActivateWeights(version="2", policy="drop"))
    assert core.lengths("ann", version="1") is None
    core.command("back", ActivateWeights(version="1"))
    assert core.hits(core_served(core, "ann", 16)) == (0, 0, 16)


def test_activating_the_active_version_changes_nothing():
    core = CoreUnderTest()
    core_served(core, "ann", 16)
    core.command("switch", ActivateWeights(version="1", policy="drop"))
    assert core.result("switch").previous == "1"
    assert core.hits(core_served(core, "ann", 16)) == (16, 0, 0)


def refreshing_core(users, **options):
    core = CoreUnderTest(pages=128, weights=WeightsConfig(refresh_users=3), **options)
    for user in users:
        core_served(core, user, 8)
    core.load("2")
    return core


def test_refresh_computes_the_users_seen_last_before_the_switch():
    core = refreshing_core(["old", "ann", "bob", "cid"])
    core.command("switch", ActivateWeights(version="2", policy="refresh"))
    assert core.result("switch") is None and core.core.info.weights_version == "1"
    core.settle()
    activated = core.result("switch")
    assert (activated.refreshed_users, activated.is_complete) == (3, True)
    assert core.core.info.weights_version == "2"
    for user in ("ann", "bob", "cid"):
        assert core.hits(core_served(core, user, 8)) == (8, 0, 0)
    assert core.hits(core_served(core, "old", 8)) == (0, 0, 8)


def test_refresh_ends_when_its_time_is_over():
    core = refreshing_core(["ann", "bob", "cid"])
    core.runner.steps.clear()
    core.command("switch", ActivateWeights(version="2", policy="refresh", budget_s=0.005))
    core.settle()
    activated = core.result("switch")
    assert not activated.is_complete and activated.refreshed_users == 2
    assert core.core.info.weights_version == "2"


def test_clients_go_before_the_refresh():
    core = refreshing_core(["ann", "bob", "cid"], max_batch_requests=1)
    core.runner.steps.clear()
    core.command("switch", ActivateWeights(version="2", policy="refresh"))
    for user in ("dot", "eve"):
        core.rank(user, 4)
    core.settle()
    versions = [step.version for step in core.runner.steps]
    assert versions.index("1") < versions.index("2") or versions[:2] == ["2", "1"]
    assert versions.count("1") == 2 and core.result("switch").refreshed_users == 3


def test_request_of_a_user_does_not_wait_behind_its_refresh():
    core = refreshing_core(["ann", "bob", "cid"], max_batch_requests=1)
    core.command("switch", ActivateWeights(version="2", policy="refresh"))
    request_id = core.rank("bob", events(8, salt=sum(map(ord, "bob"))), weights_version="2")
    core.settle()
    assert core.response(request_id).usage.weights_version == "2"
    assert core.result("switch") is not None


def test_histories_of_forgotten_users_are_not_kept():
    core = refreshing_core(["ann", "bob"])
    core.command("forget", ForgetUser(namespace="", user_id="ann"))
    core.command("switch", ActivateWeights(version="2", policy="refresh"))
    core.settle()
    assert core.result("switch").refreshed_users == 1
    assert core.lengths("ann", version="2") is None


def test_request_of_a_user_waits_for_one_piece_of_its_refresh_at_most():
    core = CoreUnderTest(
        weights=WeightsConfig(refresh_users=1), max_batch_tokens=8, max_batch_requests=1
    )
    core_served(core, "ann", 40)
    core.load("2")
    core.command("switch", ActivateWeights(version="2", policy="refresh"))
    core.steps()
    request_id = core.rank("ann", 40, weights_version="2")
    others = [core.rank(user, 40) for user in ("bob", "cid", "dot", "eve")]
    core.settle()
    assert not core.core.unfinished() and core.result("switch").refreshed_users == 0
    assert core.outcome_order.index(request_id) < core.outcome_order.index(others[-1])


@pytest.mark.parametrize(
    ("command", "num_left"), [(ForgetUser(namespace="", user_id="ann"), 2), (ResetCache(), 0)]
)
def test_users_forgotten_during_a_refresh_are_not_computed_again(command, num_left):
    core = refreshing_core(["ann", "bob", "cid"])  # cid and bob are computed first
    core.command("switch", ActivateWeights(version="2", policy="refresh"))
    core.steps()
    core.command("remove", command)
    core.settle()
    assert core.result("switch") is not None
    assert core.lengths("ann", version="2") is None
    assert core.core.usage().num_users == 2 * num_left
    core.command("back", ActivateWeights(version="1", policy="refresh"))
    core.settle()
    assert core.result("back").refreshed_users == num_left


def test_user_seen_last_stays_so_after_a_refresh():
    core = refreshing_core(["ann", "bob", "cid"])
    core.command("switch", ActivateWeights(version="2", policy="refresh"))
    core.settle()
    core_served(core, "dot")
    core.command("retire", RetireWeights(version="1"))
    core.step()
    core.load("3")
    core.command("again", ActivateWeights(version="3", policy="refresh"))
    core.settle()
    assert core.lengths("ann", version="3") is None
    assert core.lengths("cid", version="3") == (8, 8)


def test_request_with_an_id_like_a_refresh_gets_its_own_outcome():
    core = refreshing_core(["ann", "bob", "cid"])
    core.command("switch", ActivateWeights(version="2", policy="refresh"))
    core.steps()
    own = [entry.request.request_id for entry in core.core.unfinished()]
    assert len(own) == 2 and not any(request_id[-1].isdigit() for request_id in own)


# Retiring


def test_retire_waits_for_bound_requests_and_refuses_new_ones():
    core = core_with_two(max_batch_tokens=8)
    core_served(core, "ann", 4, weights_version="2")
    bound = core.rank("bob", 20, weights_version="2")
    core.steps()
    core.command("retire", RetireWeights(version="2"))
    core.steps()
    assert core.result("retire") is None
    assert [info.weights_version for info in core.core.served.infos] == ["1"]
    refused = core.error(core.rank("cid", 4, weights_version="2"))
    assert refused.code == "unknown_model" and "being retired" in refused.message
    core.settle()
    assert version_of(core, bound) == "2"
    retired = core.result("retire")
    assert (retired.version, retired.device_tokens) == ("2", 24)
    assert list(list_of(core)) == ["1"]
    core.assert_everything_comes_back()


def test_front_is_told_at_once_that_a_version_takes_no_more_requests():
    core = core_with_two(max_batch_tokens=8)
    core.rank("ann", 20, weights_version="2")
    core.steps()
    core.command("retire", RetireWeights(version="2"))
    assert core.result("retire") is None
    assert core.announced[-1].versions == ("1",)
    num_announced = len(core.announced)
    core.steps()
    assert len(core.announced) == num_announced


def test_retire_can_fail_bound_requests():
    core = core_with_two(max_batch_tokens=8)
    waiting = [core.rank(user, 20, weights_version="2") for user in ("ann", "bob")]
    other = core.rank("cid", 4)
    core.steps()
    core.command("retire", RetireWeights(version="2", mode="fail"))
    core.collect()
    assert {core.error(request_id).code for request_id in waiting} == {"weights_retired"}
    assert core.result("retire") is None, "the step still reads its pages"
    core.settle()
    assert core.result("retire") is not None
    assert version_of(core, other) == "1"
    core.assert_everything_comes_back()


def test_name_of_a_retired_version_can_be_loaded_again_with_nothing_left_of_it():
    core = core_with_two()
    core_served(core, "ann", 16, weights_version="2")
    core.command("retire", RetireWeights(version="2"))
    core.settle()
    core.replies.pop("load-2")
    core.load("2")
    assert core.hits(core_served(core, "ann", 16, weights_version="2")) == (0, 0, 16)


# Quotas


def test_version_below_its_quota_is_not_robbed():
    core = CoreUnderTest(pages=16)
    core_served(core, "ann", 24)
    core.load("2")
    for user in ("bob", "cid", "dot"):
        core_served(core, user, 24, weights_version="2")
    assert core.lengths("ann", version="1")[0] == 24


def test_quotas_of_any_shares_fit_into_the_pool():
    core = CoreUnderTest(pages=16, weights=WeightsConfig(max_weights_versions=3))
    core.load("2", share=0.01)
    core.load("3", share=1e-15)
    for user in range(20):
        core_served(core, f"a{user}", 4)
    for version in ("2", "3"):
        assert version_of(core, core_served(core, "ann", 4, weights_version=version)) == version


def test_version_above_its_quota_does_not_keep_pages_from_another_for_ever():
    core = CoreUnderTest(pages=8, tiers="device", max_batch_requests=3)
    core.load("2", share=0.75)
    for user in range(9):
        core.rank(f"a{user}", 4)
    large = core.rank("ann", 24, weights_version="2")
    for user in range(9, 60):  # there are always three more, younger ones
        core.rank(f"a{user}", 4)
    core.settle()
    assert core.outcome_order.index(large) < 20
    assert len(core.outcomes) == 61


def test_can_never_fit_is_measured_against_the_quota():
    core = CoreUnderTest(pages=16, max_uncut_tokens=64)
    assert core.hits(core_served(core, "ann", 48)) == (0, 0, 48)
    core.load("2")
    request_id = core_served(core, "bob", 48)
    assert core.response(request_id).usage.reuse == "bypass"
    assert core.value("scratch_runs_total", "never_fits") == 1


def test_request_admitted_before_its_quota_shrank_runs_outside_the_cache():
    core = CoreUnderTest(pages=16, max_batch_tokens=16, max_uncut_tokens=64)
    request_id = core.rank("ann", 48)
    core.steps()
    core.load("2")
    core.settle()
    assert core.response(request_id).usage.reuse == "bypass"
    core.assert_everything_comes_back()


def test_request_too_large_to_run_outside_the_cache_ends_when_its_quota_shrinks():
    core = CoreUnderTest(pages=16, max_batch_tokens=16, max_uncut_tokens=40)
    request_id = core.rank("ann", 48)
    core.steps()
    core.load("2")
    core.settle()
    error = core.error(request_id)
    assert error.code == "too_large" and (error.limit, error.value) == (40, 51)
    core.assert_everything_comes_back()


# Catalogue, users, reset


def test_larger_catalogue_replaces_the_model_and_keeps_the_state():
    core = CoreUnderTest()
    core_served(core, "ann", 16)
    core.command("grow", LoadCatalogue(path="more"))
    larger = core.served_model("1")
    core.loader.end(larger)
    core.step()
    assert core.result("grow").status.version == "1"
    assert core.value("weights_changes_total", "catalogue") == 1
    assert core.hits(core_served(core, "ann", 16)) == (16, 0, 0)


def test_forget_covers_all_versions_and_reset_all_users():
    core = core_with_two()
    for user in ("ann", "bob"):
        core_served(core, user, 16)
        core_served(core, user, 16, weights_version="2")
    core.command("forget", ForgetUser(namespace="", user_id="ann"))
    assert core.result("forget").device_tokens == 32
    core.command("who", DescribeUser(namespace="", user_id="bob"))
    states = core.result("who").states
    assert [(state.weights_version, state.device_tokens) for state in states] == [
        ("1", 16), ("2", 16),
    ]  # fmt: skip
    core.command("reset", ResetCache())
    reset = core.result("reset")
    assert (reset.states, reset.device_tokens) == (2, 32)
    core.command("users", ListUsers(limit=10))
    assert core.result("users").total == 0


def test_requests_queued_before_a_reset_share_no_state():
    core = CoreUnderTest(max_batch_tokens=8)
    core.warm("ann", 16)
    request_id = core.rank("ann", 16)
    core.command("reset", ResetCache())
    core.settle()
    assert core.hits(request_id) == (0, 0, 16)
    assert core.lengths("ann") is None


@pytest.mark.parametrize(("limit", "num_listed"), [(0, 0), (1, 1), (2**64 - 1, 2)])
def test_user_list_is_cut_at_any_limit(limit, num_listed):
    core = CoreUnderTest()
    for user in ("ann", "bob"):
        core_served(core, user)
    core.command("users", ListUsers(limit=limit))
    listed = core.result("users")
    assert (len(listed.states), listed.total) == (num_listed, 2)


def test_user_list_with_a_negative_limit_is_refused():
    core = CoreUnderTest()
    core.command("users", ListUsers(limit=-1))
    assert "limit is -1" in core.replies["users"].error.message


def test_users_are_listed_last_used_first():
    core = CoreUnderTest()
    for user in ("ann", "bob", "cid"):
        core_served(core, user, 8)
        core.clock.advance(1.0)
    core_served(core, "ann", 8)
    core.command("users", ListUsers(limit=2, tier="device"))
    listed = core.result("users")
    assert [state.user_id for state in listed.states] == ["ann", "cid"]
    assert listed.total == 3
    assert listed.states[1].idle_s == pytest.approx(1.0, abs=0.1)
