from nearkv.demo.progress_board import ProgressBoard


def test_line_that_only_grew_older_is_not_news():
    board = ProgressBoard()
    news = [board.update(f"engine-a: loading weights {age} s") for age in (0, 1, 14, 15, 16)]
    assert news == [True, False, False, True, False]


def test_new_stage_is_news():
    board = ProgressBoard()
    board.update("engine-a: loading weights 1 s")
    assert board.update("engine-a: warming up 1 s")


def test_summary_holds_everybody_at_work():
    board = ProgressBoard()
    board.update("engine-a: loading weights 3 s")
    board.update("engine-b: warming up 3 s")
    assert board.summary == "engine-a: loading weights 3 s · engine-b: warming up 3 s"
    assert board.update("engine-a: ready after 4 s")
    assert board.summary == "engine-b: warming up 3 s"
    assert not board.is_busy("engine-a: ready after 4 s")
