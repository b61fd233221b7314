"""Where requests went lately."""

from nearkv.ingress.placements import Placed, Placements


def test_requests_and_new_tokens_are_counted_by_incarnation():
    placements = Placements()
    placements.note("a", "i", 100)
    placements.note("a", "i", 50)
    assert placements.at("a", "i") == Placed(2.0, 150.0)
    assert placements.at("a", "j") is None


def test_old_ones_fade():
    placements = Placements(window_requests=4)
    for _ in range(40):
        placements.note("a", "i", 10)
    placed = placements.at("a", "i")
    assert 3 <= placed.requests <= 8
    assert placed.new_tokens == placed.requests * 10


def test_a_new_engine_starts_where_it_is_told():
    placements = Placements()
    placements.join("a", "i", 70.0)
    placements.join("a", "i", 9.0)
    assert placements.at("a", "i") == Placed(0.0, 70.0)


def test_those_gone_are_forgotten():
    placements = Placements()
    placements.note("a", "i", 1)
    placements.note("b", "i", 1)
    placements.forget({("b", "i")})
    assert placements.at("a", "i") is None
    assert placements.at("b", "i") == Placed(1.0, 1.0)
