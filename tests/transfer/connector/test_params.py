"""``kv_transfer_params`` in and out."""

import pytest

from nearkv.transfer.connector.params import lease_params, read_address, wants_lease
from nearkv.transfer.messages import LeaseAddress

ADDRESS = LeaseAddress(lease="l", engine="p", epoch="e", node="n", agent="http://127.0.0.1:1")


def test_what_p_answers_leads_d_to_the_lease():
    params = lease_params(ADDRESS, 64)
    assert params["remote_num_tokens"] == 64
    assert read_address(params) == ADDRESS
    assert not wants_lease(params)


@pytest.mark.parametrize("params", [None, {}, {"do_remote_prefill": False}])
def test_requests_that_bring_no_lease(params):
    assert read_address(params) is None


@pytest.mark.parametrize("field", ["remote_lease_id", "remote_engine_id", "remote_epoch"])
@pytest.mark.parametrize("value", [None, "", 7, ["x"], "x" * 513])
def test_addresses_that_cannot_be_are_none_of_ours(field, value):
    assert read_address({**lease_params(ADDRESS, 64), field: value}) is None


def test_a_stock_connectors_parameters_are_none_of_ours():
    params = {"do_remote_prefill": True, "remote_engine_id": "x", "remote_block_ids": [[1]]}
    assert read_address(params) is None


def test_a_prefill_for_somebody_else_wants_a_lease():
    assert wants_lease({"do_remote_decode": True, "remote_engine_id": None})
    assert not wants_lease({"do_remote_decode": False})
    assert not wants_lease(None)
