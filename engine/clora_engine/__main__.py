"""`clora-engine serve` and `clora-engine follow`: thin on purpose; see engine.py and follow.py."""

from __future__ import annotations

import argparse
import asyncio
import logging
import sys
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from clora_engine.config import EngineConfig


def main(argv: list[str] | None = None) -> int:
    """Exit codes: 0 stopped, 1 it could not start, 2 wrong flags, 3 the trainer died."""
    from clora_engine import config, follow, last_words
    from clora_engine.errors import EngineError

    parser = argparse.ArgumentParser(prog="clora-engine", description="A warm engine that trains many LoRA adapters.")
    commands = parser.add_subparsers(dest="command", required=True)
    serve_parser = commands.add_parser("serve", help="load the model and serve the control API")
    config.add_arguments(serve_parser)
    follow_parser = commands.add_parser("follow", help="train with an engine on another node, which serves")
    follow.add_arguments(follow_parser)
    args = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    logging.getLogger("httpx").setLevel(logging.WARNING)
    run: Callable[[], int]
    try:
        if args.command == "follow":
            run = partial(follow.follow, follow.from_arguments(args))
        else:
            run = partial(_serve, config.from_arguments(args))
    except ValueError as error:
        (follow_parser if args.command == "follow" else serve_parser).error(str(error))
    try:
        return run()
    except (EngineError, ValueError) as error:
        print(f"clora-engine: {error}", file=sys.stderr)
        last_words.tell(str(error))
        return 1


def _serve(config: EngineConfig) -> int:
    from clora_engine.engine import serve  # with vLLM, which a node that follows does not need

    return asyncio.run(serve(config))


if __name__ == "__main__":
    sys.exit(main())
