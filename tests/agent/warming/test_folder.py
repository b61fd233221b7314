"""A folder of prompts, as Kubernetes mounts it."""

import os

import msgspec

from nearkv.agent.warming.folder import read_folder


def test_prompts_and_bodies_are_read_and_the_rest_is_named(tmp_path):
    data = tmp_path / "..2026"
    data.mkdir()
    (data / "doc.txt").write_text("héllo")
    (tmp_path / "..data").symlink_to(data)
    (tmp_path / "doc.txt").symlink_to(tmp_path / "..data" / "doc.txt")
    (tmp_path / "other.json").write_text('{"token_ids": [1]}')
    (tmp_path / "README").write_text("x")
    (tmp_path / "bad name.txt").write_text("x")
    (tmp_path / "latin.txt").write_bytes(b"\xff")
    (tmp_path / "large.txt").write_text("x" * 101)
    os.mkfifo(tmp_path / "pipe.txt")
    bodies, problems = read_folder(tmp_path, max_files=10, max_body_bytes=100)
    assert {name: msgspec.json.decode(body) for name, body in bodies.items()} == {
        "doc": {"prompt": "héllo"},
        "other": {"token_ids": [1]},
    }
    named = ["README", "bad name.txt", "large.txt", "latin.txt", "pipe.txt"]
    assert [problem.partition(":")[0] for problem in problems] == named


def test_a_folder_that_is_not_there_is_a_problem(tmp_path):
    bodies, problems = read_folder(tmp_path / "no", max_files=10, max_body_bytes=100)
    assert (bodies, len(problems)) == ({}, 1)


def test_only_so_many_files_are_read(tmp_path):
    for i in range(5):
        (tmp_path / f"{i}.txt").write_text("x")
    bodies, problems = read_folder(tmp_path, max_files=3, max_body_bytes=100)
    assert (len(bodies), len(problems)) == (3, 1)
