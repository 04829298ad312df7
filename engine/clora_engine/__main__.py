"""`clora-engine serve`: thin on purpose; see engine.py."""

from __future__ import annotations

import argparse
import asyncio
import logging
import sys


def main(argv: list[str] | None = None) -> int:
    """Exit codes: 0 stopped, 1 it could not start, 2 wrong flags, 3 the trainer died."""
    from clora_engine.config import add_arguments, from_arguments

    parser = argparse.ArgumentParser(prog="clora-engine", description="A warm engine that trains many LoRA adapters.")
    commands = parser.add_subparsers(dest="command", required=True)
    serve_parser = commands.add_parser("serve", help="load the model and serve the control API")
    add_arguments(serve_parser)
    args = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    logging.getLogger("httpx").setLevel(logging.WARNING)
    try:
        config = from_arguments(args)
    except ValueError as error:
        serve_parser.error(str(error))

    from clora_engine import last_words
    from clora_engine.engine import serve
    from clora_engine.errors import EngineError

    try:
        return asyncio.run(serve(config))
    except (EngineError, ValueError) as error:
        print(f"clora-engine: {error}", file=sys.stderr)
        last_words.tell(str(error))
        return 1


if __name__ == "__main__":
    sys.exit(main())
