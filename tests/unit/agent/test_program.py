"""`gpuledger agent` as a program: its settings and its imports."""

import asyncio
import json
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from gpuledger.errors import SettingsError, UserError
from gpuledger.settings import load_settings
from gpuledger_agent.command import OPTIONS
from gpuledger_agent.settings import (
    AgentSettings,
    AllocationsSettings,
    ExpositionSettings,
    KubeletApiSettings,
    KubeletSettings,
    name_node,
)
from gpuledger_agent.source_selection import find_source, open_source
from tests.errors import has_words
from tests.hanging import HANG_SECONDS

HEAVY = ("kubernetes_asyncio", "kubernetes", "deltalake", "arro3", "pyarrow", "duckdb", "simulator")


def test_the_agent_loads_no_library_that_a_node_does_not_need() -> None:
    code = "import gpuledger_agent.command, json, sys; print(json.dumps(sorted(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, timeout=60)
    modules = {name.partition(".")[0] for name in json.loads(done.stdout)}
    assert "pynvml" in modules
    assert not modules & set(HEAVY)


def test_the_agent_loads_no_module_that_it_does_not_need() -> None:
    # As in its image, which has no `rich`; structlog imports it if it is installed.
    code = (
        "import json, sys; sys.modules['rich'] = None;"
        "import gpuledger_agent.command, gpuledger.bus.kafka;"
        "print(json.dumps(sorted(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, timeout=60)
    needless = {"importlib.metadata", "zipfile", "statistics", "difflib"}
    # Modules that read topics: the agent only writes.
    needless |= {f"gpuledger.bus.kafka_{part}" for part in ("consumer", "reader", "unpacking")}
    assert needless & set(json.loads(done.stdout)) == set()


def test_starting_parses_no_source_for_help_texts() -> None:
    # Memory for reading and parsing them would stay in the process.
    code = (
        "import linecache; from gpuledger_agent.command import OPTIONS;"
        "from gpuledger_agent.settings import AgentSettings;"
        "from gpuledger.settings import load_settings;"
        "load_settings(AgentSettings, prog='p', description='', options=OPTIONS, argv=[]);"
        "print(*(file for file in linecache.cache if file.endswith('settings.py')))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, timeout=60)
    assert done.stdout.split() == []


@pytest.mark.parametrize(
    ("given", "environ", "name"),
    [
        ("given", {"NODE_NAME": "kubernetes"}, "given"),
        ("", {"NODE_NAME": "kubernetes"}, "kubernetes"),
        ("GPU_Node-1.Example", {}, "GPU_Node-1.Example"),
        ("", {"NODE_NAME": "gpu__7"}, "gpu__7"),
    ],
)
def test_a_node_is_named_by_its_settings_then_by_kubernetes(
    given: str, environ: dict[str, str], name: str
) -> None:
    assert name_node(AgentSettings(node_name=given), environ).node_name == name


@pytest.mark.parametrize("name", ["_a", "a_", "-a", "a..b", "a/b", "a b", "a\n", "a" * 254, "ä"])
@pytest.mark.parametrize("origin", ["node_name", "NODE_NAME"])
def test_an_invalid_node_name_is_rejected_in_one_line(name: str, origin: str) -> None:
    settings = AgentSettings(node_name=name if origin == "node_name" else "")
    environ = {"NODE_NAME": name}
    with pytest.raises(SettingsError, check=has_words(f"{origin}: ", "NODE_NAME")) as refused:
        name_node(settings, environ)
    assert len(str(refused.value)) < 400
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("kubelet", "name"),
    [
        (KubeletSettings(socket=Path("/nonexistent")), "GPU_7.Example.COM"),
        (KubeletSettings(socket=Path(__file__)), "gpu_7.example.com"),
        (KubeletSettings(enabled=True, socket=Path("/nonexistent")), "gpu_7.example.com"),
        (KubeletSettings(enabled=False, socket=Path(__file__)), "GPU_7.Example.COM"),
    ],
    ids=["no socket", "a socket", "enabled", "disabled"],
)
def test_a_host_name_is_kept_unless_a_kubelet_names_the_node_in_lower_case(
    monkeypatch: pytest.MonkeyPatch, kubelet: KubeletSettings, name: str
) -> None:
    monkeypatch.setattr("platform.node", lambda: "GPU_7.Example.COM")
    assert name_node(AgentSettings(kubelet=kubelet), {}).node_name == name


def test_a_node_without_a_name_uses_the_host_name() -> None:
    assert name_node(AgentSettings(), {}).node_name


@pytest.mark.parametrize(
    ("sampling_interval_seconds", "deadline_seconds", "poll_timeout_seconds"),
    [(1.0, 0.8, 0.8), (0.25, 0.8, 0.2), (1.0, 5.0, 0.8), (10.0, 0.8, 0.8)],
)
def test_a_gpu_may_delay_a_tick_at_most_until_the_next_one(
    sampling_interval_seconds: float, deadline_seconds: float, poll_timeout_seconds: float
) -> None:
    settings = AgentSettings(
        sampling_interval_seconds=sampling_interval_seconds, gpu_timeout_seconds=deadline_seconds
    )
    assert settings.poll_timeout_seconds == pytest.approx(poll_timeout_seconds)


@pytest.mark.parametrize(
    "source", ["auto", "nvml", "simulated", "simulated:scenarios/quickstart.yaml"]
)
def test_a_source_can_be_selected(source: str) -> None:
    environ = {"GPULEDGER_SOURCE": source}
    loaded = load_settings(AgentSettings, prog="p", description="", argv=[], environ=environ)
    assert loaded.source == source


@pytest.mark.parametrize("source", ["", "dcgm", "simulated:", "nvml:0"])
def test_an_unknown_source_is_rejected(source: str) -> None:
    environ = {"GPULEDGER_SOURCE": source}
    with pytest.raises(SettingsError, check=has_words("auto", "nvml", "simulated[:FILE]")):
        load_settings(AgentSettings, prog="p", description="", argv=[], environ=environ)


def test_each_option_for_a_node_without_kafka_sets_its_setting() -> None:
    argv = ["--no-kafka", "--process-series", "--listen", "127.0.0.1:1", "--source", "simulated"]
    loaded = load_settings(
        AgentSettings, prog="p", description="", options=OPTIONS, argv=argv, environ={}
    )
    assert loaded.no_kafka
    assert loaded.exposition.process_series
    assert loaded.http.listen == "127.0.0.1:1"


def test_without_kafka_its_client_is_not_loaded() -> None:
    code = "import gpuledger_agent.command, json, sys; print(json.dumps(sorted(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, timeout=60)
    modules = {name.partition(".")[0] for name in json.loads(done.stdout)}
    assert not modules & {"aiokafka", "bcrypt"}


def test_the_default_scenario_has_one_node_with_any_name() -> None:
    machine = find_source(AgentSettings(source="simulated", node_name="anything"))
    assert len(machine.gpus.open()) == 4


@pytest.mark.parametrize(
    ("settings", "without_token", "with_token"),
    [
        ({}, False, True),
        ({"allocations": AllocationsSettings(sources=("hami",))}, True, True),
        ({"allocations": AllocationsSettings(sources=())}, False, False),
        ({"exposition": ExpositionSettings(pod_labels=("team",))}, True, True),
    ],
    ids=["by default", "a product", "no product", "labels"],
)
def test_the_list_of_pods_is_read_if_it_is_wanted_and_by_default_if_there_is_a_token(
    settings: dict[str, Any], *, without_token: bool, with_token: bool, tmp_path: Path
) -> None:
    file = tmp_path / "token"
    kubelet = KubeletSettings(api=KubeletApiSettings(token_file=file))
    chosen = AgentSettings(source="nvml", node_name="n", kubelet=kubelet, **settings)
    assert (find_source(chosen).pod_list is not None) == without_token
    file.write_text("token")
    assert (find_source(chosen).pod_list is not None) == with_token


def test_a_recording_rejects_the_kubelet_setting() -> None:
    settings = AgentSettings(
        source="recorded:node.jsonl", kubelet=KubeletSettings(enabled=True), node_name="n"
    )
    with pytest.raises(UserError, check=has_words("kubelet.enabled", "auto", "false")):
        find_source(settings)


def test_stopping_does_not_wait_for_a_driver_that_does_not_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    begun, goes_on = threading.Event(), threading.Event()

    def hang(_: object) -> None:
        begun.set()
        goes_on.wait()

    monkeypatch.setattr("gpuledger_agent.source_selection.probe", hang)

    async def begin_and_end() -> None:
        opening = asyncio.create_task(open_source(AgentSettings()))
        while not begun.is_set():  # noqa: ASYNC110  # it is set in a thread
            await asyncio.sleep(0)
        opening.cancel()

    # If stopping did wait, the timeout would release it.
    emergency = threading.Timer(HANG_SECONDS, goes_on.set)
    emergency.start()
    asyncio.run(begin_and_end())
    assert not goes_on.is_set()
    emergency.cancel()
    goes_on.set()
