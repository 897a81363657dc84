"""A fault of one rank ends all of them, and each names the rank: Gloo, three processes.

Not proved here: NCCL, which ends a process by itself.
"""

import multiprocessing
import os
from pathlib import Path

import pytest

PATIENCE_S = 120
"""Far above what a rank needs, far below the sleep of the ranks that hang."""


def run_rank(case: str, rank: int, connection, log: Path) -> None:
    os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT, 0o600), 2)
    from tests.distributed.trainer.broken_ranks import main

    main(case, rank, connection)


@pytest.fixture(scope="module")
def context():
    """Ranks are forked from a process that has loaded torch, once for all cases."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.distributed.trainer.broken_ranks"])
    return context


def play(context, case: str, folder: Path) -> list[tuple[int, str]]:
    """Exit status and output of each rank."""
    pipes = [context.Pipe() for _ in range(3)]
    logs = [folder / f"{rank}.log" for rank in range(3)]
    ranks = [context.Process(target=run_rank, args=(case, rank, pipes[rank][1], logs[rank])) for rank in range(3)]
    try:
        for rank in ranks:
            rank.start()
        port = pipes[0][0].recv()
        for ours, _ in pipes[1:]:
            ours.send(port)
        for rank in ranks:
            rank.join(PATIENCE_S)
        return [(rank.exitcode, log.read_text()) for rank, log in zip(ranks, logs, strict=True)]
    finally:
        for rank in ranks:
            rank.kill()


def test_a_rank_that_is_missing_is_named_with_the_collective(context, tmp_path):
    ranks = play(context, "sleeps", tmp_path)
    assert [status for status, _ in ranks] == [1, 1, 1], ranks
    for _, output in ranks:  # also the one that slept
        assert "the collective all_reduce, in reduce_with_others (trainer/broken_ranks.py:" in output
        assert "rank 1 is missing: it is in sleeps (trainer/broken_ranks.py:" in output
        assert output.count("is missing") == 1


def test_a_rank_that_dies_ends_the_others(context, tmp_path):
    ranks = play(context, "dies", tmp_path)
    assert [status for status, _ in ranks] == [1, 1, -9], ranks
    for _, output in ranks[:2]:
        assert "the collective all_reduce, in reduce_with_others" in output
        assert "rank 2 is missing: it does not answer: its process has exited" in output
        assert output.count("is missing") == 1


def test_the_death_of_the_rank_that_serves_the_store_ends_the_others(context, tmp_path):
    ranks = play(context, "first_dies", tmp_path)
    assert [status for status, _ in ranks] == [-9, 1, 1], ranks
    assert all("rank 0 is missing" in output for _, output in ranks[1:])


def test_an_error_of_one_rank_ends_all_and_is_named(context, tmp_path):
    ranks = play(context, "refuses", tmp_path)
    assert [status for status, _ in ranks] == [1, 1, 1], ranks
    for _, output in ranks:
        assert "rank 1: RouteError: position 1, MoE layer 0 of this rank: experts [3, 3] repeat one" in output


def test_ranks_that_exit_with_success_do_not_end_one_another(context, tmp_path):
    assert play(context, "ends_well", tmp_path) == [(0, "")] * 3
