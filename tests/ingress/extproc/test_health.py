"""The names of the health protocol, and their statuses."""

import pytest

from nearkv.ingress.extproc.health import Serving, asked_service, encode_status, status_of
from nearkv.protobuf import WireError, text_field

PICKER = "envoy.service.ext_proc.v3.ExternalProcessor"


@pytest.mark.parametrize(
    ("name", "ready", "unready"),
    [
        ("liveness", Serving.SERVING, Serving.SERVING),
        ("readiness", Serving.SERVING, Serving.NOT_SERVING),
        (PICKER, Serving.SERVING, Serving.NOT_SERVING),
        ("", Serving.SERVING, Serving.NOT_SERVING),
        ("other", Serving.SERVICE_UNKNOWN, Serving.SERVICE_UNKNOWN),
    ],
)
def test_liveness_is_about_the_process_and_the_rest_about_traffic(name, ready, unready):
    assert status_of(name, is_ready=True) is ready
    assert status_of(name, is_ready=False) is unready


def test_questions_and_answers_on_the_wire():
    assert asked_service(b"") == ""
    assert asked_service(text_field(1, "liveness")) == "liveness"
    assert encode_status(Serving.SERVING) == b"\x08\x01"
    with pytest.raises(WireError):
        asked_service(b"\xff")
