"""How records and spans are set up: what is missing is said, equal settings have equal ids."""

import subprocess
import sys

import pytest
from prometheus_client import CollectorRegistry

from nearkv.ingress.recording.opening import identify_settings, open_recording
from nearkv.ingress.settings import IngressSettings
from nearkv.ingress.tracing.errors import TracingUnavailableError

TRACED = {"enabled": True, "sampling_ratio": 0.5}


def opened(**settings):
    return open_recording(IngressSettings(**settings), CollectorRegistry())


def begun(recording, traceparent=""):
    return recording.recorder.begin("r", "/v1/x", arrived_at=0.0, traceparent=traceparent)


def test_tracing_without_opentelemetry_says_what_to_install(monkeypatch):
    monkeypatch.delitem(sys.modules, "nearkv.ingress.tracing.exporting", raising=False)
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    with pytest.raises(TracingUnavailableError, match=r"pip install 'nearkv\[otel\]'"):
        opened(tracing=TRACED)
    opened()


def test_opentelemetry_is_loaded_only_where_tracing_is_on():
    program = "import sys, nearkv.ingress.app; sys.exit('opentelemetry' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_without_tracing_no_request_has_a_place_in_a_trace():
    watch = begun(opened(), "00-" + "1" * 32 + "-" + "2" * 16 + "-01")
    assert watch.record.trace is None
    assert (watch.traceparent, watch.prefill_traceparent) == ("", "")


def test_with_tracing_every_request_has_one_and_the_legs_differ():
    recording = opened(tracing=TRACED)
    watch = begun(recording, "00-" + "1" * 32 + "-" + "2" * 16 + "-01")
    assert watch.traceparent.startswith("00-" + "1" * 32)
    assert watch.traceparent != watch.prefill_traceparent
    assert begun(recording, "nonsense").record.trace.parent_id == 0


def test_the_id_of_settings_follows_what_decisions_depend_on():
    usual = identify_settings(IngressSettings())
    assert identify_settings(IngressSettings(listen="127.0.0.1:1")) == usual
    assert identify_settings(IngressSettings(policy="round-robin")) != usual
    assert identify_settings(IngressSettings(cost={"crowding_weight": 4})) != usual
    assert identify_settings(IngressSettings(gate={"min_free_ratio": 0.2})) != usual
