"""Entry of a trainer rank."""

import argparse
import logging
import os
from pathlib import Path

from megatron_rl.config import RunFolder
from megatron_rl.processes import end_forks_with_me, ignore_sigterm


def main() -> None:
    """Run one rank; its exit code is 1 after a fault of any rank."""
    parser = argparse.ArgumentParser(prog="megatron_rl.trainer", description="One trainer rank of a run; started by megatron-rl.")
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--resume", action="store_true", help="continue from the latest checkpoint, if there is one")
    arguments = parser.parse_args()
    ignore_sigterm()
    end_forks_with_me()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s: %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)  # a line for each request otherwise
    # Loads torch: only in the rank itself, not where a helper process of dist-checkpointing imports this file.
    from megatron_rl.trainer.faults import RankFaultError
    from megatron_rl.trainer.loop import train

    try:
        train(RunFolder(arguments.run_dir), arguments.resume)
    except RankFaultError:
        logging.getLogger(__name__).exception("this rank exits")
        logging.shutdown()
        os._exit(1)  # a normal exit would wait for threads that still wait for a server or another rank


if __name__ == "__main__":
    main()
