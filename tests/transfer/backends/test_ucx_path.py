import os
from pathlib import Path

import pytest

from nearkv.transfer.backends.native_transport import is_rdma
from nearkv.transfer.backends.nixl import found_path
from nearkv.transfer.backends.ucx_log import arrange_log, read_log, reads_of
from nearkv.transfer.backends.ucx_path import path_of, transports_of

ENDPOINT = """\
# UCP endpoint
#                 lane[0]:  2:{short}.0 md[2]           -> md[2]/sysv/sysdev[255] seg 1 am
#                 lane[1]:  4:{long}.0 md[4]            -> md[4]/cma/sysdev[255] seg 1 rma_bw#0
#
# +--------------------------------+------------------------------------------------------------+
# | ucp_context_0 intra-node cfg#0 | tagged message by ucp_tag_send*(multi) from host memory    |
# +--------------------------------+----------------------------------------------+-------------+
# |                        8K..inf | (?) not this one                             | tcp/lo      |
# +--------------------------------+----------------------------------------------+-------------+
# | ucp_context_0 intra-node cfg#0 | tagged message by ucp_tag_send* from host memory        |
# +--------------------------------+-------------------------------------------+-------------+
# |                          0..92 | eager short                               | {short} |
# |                        8K..inf | (?) rendezvous zero-copy read from remote | {long}  |
# +--------------------------------+-------------------------------------------+-------------+
"""
LOG = """\
[1.1] [vm:1:0]      ucp_worker.c:1997 UCX  INFO    me self cfg#0 rma_am(tcp/lo)
[1.1] [vm:1:0]   | me self cfg#0                                                    |
[1.1] [vm:1:0]   | remote memory write by ucp_put* from host memory to host         |
[1.1] [vm:1:0]   | 0..inf | zero-copy   | wrong/memory                              |
[1.1] [vm:1:0]   | me {nodes} cfg#1                                                 |
[1.1] [vm:1:0]   | remote memory write by ucp_put* from host memory to host         |
[1.1] [vm:1:0]   | 0..inf | zero-copy   | wrong/memory                              |
[1.1] [vm:1:0]   | me {nodes} cfg#1                                                 |
[1.1] [vm:1:0]   | remote memory read by ucp_get*(multi) into host memory from host |
[1.1] [vm:1:0]   | Range  | Description |                  Config                   |
[1.1] [vm:1:0]   | 0..8K  | short       | tcp/lo                                    |
[1.1] [vm:1:0]   | 8K..inf | {how} | {transport}  |
[1.1] [vm:1:0]   | other inter-node cfg#2                                           |
[1.1] [vm:1:0]   | remote memory read by ucp_get*(multi) into host memory from host |
[1.1] [vm:1:0]   | 0..inf | zero-copy   | other/memory                              |
"""


@pytest.fixture
def no_ucx_settings(monkeypatch):
    for name in ("UCX_LOG_FILE", "UCX_LOG_LEVEL", "UCX_PROTO_INFO"):
        monkeypatch.setenv(name, "so that it is put back")
        monkeypatch.delenv(name)
    return monkeypatch


def test_an_endpoints_path_is_that_of_long_messages():
    path = path_of(ENDPOINT.format(short="sysv/memory", long="cma/memory"))
    assert not path.rdma
    assert path.detail == (
        "cma/memory: rendezvous zero-copy read from remote; lanes: cma/memory, sysv/memory"
    )


def test_an_endpoints_path_is_rdma_where_long_messages_go_by_it():
    assert path_of(ENDPOINT.format(short="sysv/memory", long="rc_mlx5/mlx5_0:1")).rdma
    assert not path_of(ENDPOINT.format(short="rc_mlx5/mlx5_0:1", long="tcp/eth0")).rdma


def test_an_endpoint_that_says_nothing_is_unknown_and_not_rdma():
    path = path_of("# UCP endpoint\n lane[0]: 1:rc_mlx5/mlx5_0:1.0 md[1]\n")
    assert not path.rdma
    assert path.detail == "unknown; lanes: rc_mlx5/mlx5_0:1"
    assert path_of("").detail == "unknown; lanes: none seen"


def test_a_contexts_transports_are_read():
    info = "#  resource 0  :  md 0  dev 0  flags -- self/memory\n"
    info += "#  resource 1  :  md 1  dev 1  flags -- rc_verbs/mlx5_0:1\n"
    assert transports_of(info) == ("self/memory", "rc_verbs/mlx5_0:1")


@pytest.mark.parametrize("nodes", ["intra-node", "inter-node"])
def test_the_log_says_what_an_agents_own_reads_go_over(nodes):
    log = LOG.format(nodes=nodes, how="zero-copy", transport="rc_mlx5/mlx5_0:1")
    assert reads_of("me", log) == ("rc_mlx5/mlx5_0:1", "zero-copy")
    assert reads_of("other", log) == ("other/memory", "zero-copy")
    assert reads_of("stranger", log) is None
    assert reads_of("me", "") is None


@pytest.mark.parametrize(
    ("reads", "rdma"),
    [
        (("rc_mlx5/mlx5_0:1", "zero-copy"), True),
        (("tcp/lo", "software emulation"), False),
        (("rc_mlx5/mlx5_0:1", "software emulation"), False),
        (("cma/memory", "zero-copy"), False),
        (None, False),
    ],
    ids=str,
)
def test_reads_are_rdma_only_where_an_adapter_does_them(reads, rdma):
    assert found_path(reads).rdma is rdma


@pytest.mark.parametrize(
    ("transport", "rdma"),
    [
        *[(name, True) for name in ("rc_mlx5/mlx5_0:1", "dc_mlx5/a", "ud_verbs", "srd/efa0")],
        *[(name, False) for name in ("tcp/eth0", "self/memory", "sysv/memory", "cma", "udp")],
    ],
)
def test_transports_of_adapters_are_told_from_others(transport, rdma):
    assert is_rdma(transport) is rdma


def test_the_log_is_read_from_where_ucx_is_told_to_write_it(no_ucx_settings):
    arrange_log()
    arrange_log()
    Path(os.environ["UCX_LOG_FILE"]).write_text("what UCX says")
    assert read_log() == "what UCX says"
    os.close(int(os.environ["UCX_LOG_FILE"].rsplit("/", 1)[1]))


def test_a_log_that_somebody_else_wants_is_left_alone(no_ucx_settings):
    no_ucx_settings.setenv("UCX_LOG_LEVEL", "warn")
    arrange_log()
    assert read_log() == ""
    assert "UCX_LOG_FILE" not in os.environ


def test_a_descriptor_inherited_by_name_only_is_replaced(no_ucx_settings):
    reading, writing = os.pipe()
    no_ucx_settings.setenv("UCX_LOG_FILE", f"/proc/self/fd/{writing}")
    arrange_log()
    ours = int(os.environ["UCX_LOG_FILE"].rsplit("/", 1)[1])
    assert ours not in (reading, writing)
    for fd in (reading, writing, ours):
        os.close(fd)
