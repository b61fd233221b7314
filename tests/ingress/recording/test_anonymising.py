"""Ids that stand for keys and names."""

from array import array

from nearkv.ingress.recording.anonymising import Anonymiser

KEYS = array("Q", [0, 1, 2**64 - 1, 1])


def test_equal_keys_have_equal_ids_of_32_bits():
    first, second, third, again = Anonymiser(b"secret").ids(KEYS)
    assert second == again
    assert len({first, second, third}) == 3
    assert all(0 <= one < 2**32 for one in (first, second, third))


def test_replicas_with_the_same_secret_agree_and_others_do_not():
    assert Anonymiser(b"s").ids(KEYS) == Anonymiser(b"s").ids(KEYS)
    assert Anonymiser(b"s").ids(KEYS) != Anonymiser(b"t").ids(KEYS)
    assert Anonymiser(b"s").name("anna") == Anonymiser(b"s").name("anna")
    assert Anonymiser(b"s").name("anna") != Anonymiser(b"t").name("anna")


def test_any_name_and_any_length_of_secret_will_do():
    assert len(Anonymiser(b"x" * 1000).name("\udc80")) == 16
