"""TLS between the ends of ``tcp``: who gets nothing. That it works, the contract suite shows."""

import ssl

import pytest

from nearkv.transfer.backends.tcp import TcpBackend
from nearkv.transfer.errors import Reason
from tests.transfer.backends.rig import UNTOUCHED, patient, reason_of
from tests.transfer.backends.tls import contexts, missing_openssl


@pytest.fixture
def tls():
    if missing_openssl():
        pytest.skip(missing_openssl())
    return contexts()


def test_without_tls_nothing_is_pulled_from_a_server_with_it(make_tcp, tls):
    rig = make_tcp(server_tls=tls[0], client_tls=tls[1])
    offer = rig.offer_of(rig.grant([0]))
    for backend in (TcpBackend(), TcpBackend(client_tls=tls[1], tls_name="another.name")):
        assert reason_of(lambda b=backend: b.connect(offer, rig.target, patient())) is Reason.AUTH


def test_a_reader_that_wants_tls_does_not_make_do_without(make_tcp, tls):
    rig = make_tcp()
    offer = rig.offer_of(rig.grant([0]))
    backend = TcpBackend(client_tls=tls[1])
    assert reason_of(lambda: backend.connect(offer, rig.target, patient())) is Reason.AUTH


def test_a_reader_without_a_certificate_gets_nothing(make_tcp, tls):
    rig = make_tcp(server_tls=tls[0], client_tls=tls[1])
    grant = rig.grant([0])
    anonymous = ssl.create_default_context()
    anonymous.load_verify_locations(
        cadata="".join(map(ssl.DER_cert_to_PEM_cert, tls[1].get_ca_certs(binary_form=True)))
    )
    backend = TcpBackend(client_tls=anonymous)

    def attempt():
        link = backend.connect(rig.offer_of(grant), rig.target, patient())
        try:
            link.pull(rig.request(grant, [0]), patient())
        finally:
            link.close()

    assert reason_of(attempt) in (Reason.AUTH, Reason.PEER_LOST)
    assert (rig.target_bytes == UNTOUCHED).all()
