"""What the Ray adapter refuses before it starts anything."""

import os
import threading

import pytest

from reinforge.algorithms.grpo import GRPO, GRPOConfig
from reinforge.config.schema import FinetuneConfig
from reinforge.rollout.isolation.isolated_agent import LOADER
from reinforge.rollout.isolation.worker_protocol import decode, encode
from reinforge.scale.engine_worker import find_differences, list_versions
from reinforge.scale.ray import cluster as ray_cluster
from reinforge.scale.ray.adapter import RayAdapter, RayAdapterConfig
from reinforge.scale.ray.agents import AgentHost
from reinforge.scale.ray.cluster import check_ray, count_places


@pytest.fixture(autouse=True)
def _no_token(monkeypatch, tmp_path):
    for name in ("RAY_AUTH_MODE", *ray_cluster.TOKEN_SETTINGS):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(ray_cluster, "is_installed", lambda name: True)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_workers": 0}, "greater than or equal to 1"),
        ({"num_workers": 2, "min_workers": 3}, r"min_workers \(3\) is more than num_workers \(2\)"),
        ({"resources_per_worker": {"CPU": 0}}, "expected numbers above 0, found CPU: 0"),
    ],
)
def test_settings_that_cannot_work(fields, message):
    with pytest.raises(ValueError, match=message):
        RayAdapterConfig(**fields)


def test_a_missing_package_is_refused_with_the_command_that_installs_it(monkeypatch, tiny_model_dir):
    monkeypatch.setattr(ray_cluster, "is_installed", lambda name: name != "ray")
    adapter = RayAdapter(RayAdapterConfig(), GRPO(GRPOConfig()), str(tiny_model_dir))
    problems = adapter.validate(FinetuneConfig(device="cpu", trainer_adapter="cluster"))
    assert [(each.path, "ray, which is not installed" in each.message) for each in problems] == [
        ("trainer_adapters.cluster", True)
    ]
    assert 'pip install "reinforge[ray]"' in problems[0].fix


@pytest.mark.parametrize("address", ["127.0.0.1:6379", "localhost:6379", "[::1]:6379", None])
def test_a_cluster_on_this_machine_needs_no_token(address):
    assert check_ray(address) == []


@pytest.mark.parametrize("address", ["10.0.0.1:6379", "head.cluster:6379", "ray://10.0.0.1:10001", "auto"])
def test_a_cluster_elsewhere_must_demand_a_token(monkeypatch, address):
    problem = check_ray(address)[0]
    assert "runs the code of anyone" in problem.message
    assert "RAY_AUTH_MODE=token" in problem.fix
    monkeypatch.setenv("RAY_AUTH_TOKEN", "x")
    assert check_ray(address), "a token that is not demanded protects nothing"
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    assert check_ray(address) == []
    monkeypatch.delenv("RAY_AUTH_TOKEN")
    assert check_ray(address), "a mode without a token"


@pytest.mark.parametrize(
    ("nodes", "each", "places"),
    [
        ([{"CPU": 4.0}, {"CPU": 3.0}], {"CPU": 2.0}, 3),  # 2 + 1: a worker is whole on one node
        ([{"CPU": 1.0}] * 2, {"CPU": 2.0}, 0),
        ([{"CPU": 8.0, "GPU": 1.0}], {"CPU": 1.0, "GPU": 1.0}, 1),
        ([{"CPU": 8.0}], {"CPU": 1.0, "GPU": 1.0}, 0),
        ([{"CPU": 1.0, "GPU": 0.3}], {"GPU": 0.1}, 3),  # 0.3 / 0.1 is less than 3 in floating point
        ([], {"CPU": 1.0}, 0),
    ],
)
def test_room_is_counted_node_by_node(nodes, each, places):
    assert count_places(each, nodes) == places


def test_versions_may_differ_by_their_build_only():
    here = {"reinforge": "1.0", "torch": "2.13.0+cpu", "peft": "0.18.0"}
    assert find_differences(here, here | {"torch": "2.13.0+cu130"}) == []
    there = {"reinforge": "1.0", "torch": "2.12.0+cpu"}
    assert find_differences(here, there) == [
        "torch 2.12.0+cpu instead of 2.13.0+cpu",
        "peft not installed instead of 0.18.0",
    ]


def test_versions_name_the_libraries_and_our_own_code():
    versions = list_versions()
    assert {"reinforge", "code of reinforge", "torch", "transformers"} <= set(versions)
    assert len(versions["code of reinforge"]) == 12


async def test_an_actor_that_refuses_an_agent_lives_until_the_run_has_read_why(monkeypatch, tmp_path):
    ends = []
    monkeypatch.setattr(os, "_exit", ends.append)
    host, start = AgentHost([]), {"function": "absent:agent", "project_root": str(tmp_path), "loader": LOADER}
    await host.deliver(encode({"type": "start", "job": 0, **start}))
    [refused] = map(decode, await host.collect())
    assert refused["type"] == "refused"
    assert "absent" in refused["problems"][0]["message"]
    for thread in [each for each in threading.enumerate() if each.name == "agents"]:
        thread.join(10)
    assert ends == []
