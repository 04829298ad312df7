"""The trainer as a process of its own: python -m clora_engine.trainer_process --fd N --threads T and its place.

It serves the engine that started it over an inherited socket, one command at a time; a command may hold the calls of
several adapters, which are then computed together. A tenant's error is an answer; a broken socket, a dead parent, or a
device that fails (trainer_device.py) ends the process. Logs go to standard error, never to the socket. With several
devices this is rank 0, which the others follow (trainer_followers.py), or one of these (trainer_place.py).

Left out: restarting. When the trainer dies the engine's epoch ends.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import logging
import os
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import msgspec
import torch

from clora_engine import trainer_protocol as protocol
from clora_engine.adapter_files import BaseShapes
from clora_engine.errors import CheckpointError, EngineError, UserError
from clora_engine.trainer import Trainer
from clora_engine.trainer_base import DTYPES, check_checkpoint, load_base
from clora_engine.trainer_cost import Choice, choose
from clora_engine.trainer_device import first_line, is_device_failure
from clora_engine.trainer_followers import DEVICE_FAILED, Followers, HasFileno, confirmation, when_closed
from clora_engine.trainer_memory import MemoryPlan, device_free, host_memory
from clora_engine.trainer_pass import Request
from clora_engine.trainer_place import FileMeeting, Place
from clora_engine.trainer_ranks import Ranks

log = logging.getLogger("clora.trainer")

AUTO_SLOTS_SHARE = 0.25  # of the memory beside the base model; the rest is for activations


class TrainerServer:
    """Answers requests from one connected socket until the other side closes it.

    place: this process's among the ranks. followers: of rank 0.
    """

    def __init__(
        self, connection: socket.socket, *, place: Place | None = None, followers: Followers | None = None
    ) -> None:
        self._connection = connection
        self._place = place or Place()
        self._rank = self._place.rank
        self._followers = followers
        self._trainer: Trainer | None = None
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(protocol.Command)
        self._call_decoder = msgspec.msgpack.Decoder(protocol.ForwardBackward)

    def serve(self) -> None:
        """Returns at the end of the stream."""
        while (body := self._receive()) is not None:
            if self._followers is not None:
                self._followers.send(body)
            answer = self._answer(body)
            if self._rank > 0:
                self._connection.sendall(confirmation(answer.failure is not None))
                continue
            if self._followers is not None:
                self._followers.confirm(answer.failure is not None)
            reply = self._encoder.encode(answer)
            self._connection.sendall(protocol.header(reply))
            self._connection.sendall(reply)

    def _answer(self, body: bytearray) -> protocol.Reply:
        try:
            command = self._decoder.decode(body)
            return protocol.Reply(result=msgspec.Raw(self._encoder.encode(self._execute(command))))
        except Exception as error:
            if is_device_failure(error):
                self._end_by(error)
            return _failed(error)

    def _end_by(self, error: Exception) -> NoReturn:
        """Ends the process, whose device has failed, and with it all ranks; rank 0 says why."""
        log.critical("the device of rank %d has failed, and the trainer ends", self._rank, exc_info=error)
        if self._rank == 0:
            words = protocol.Failure("TrainerDied", first_line(error), "DeviceFailed", None)
            reply = self._encoder.encode(protocol.Reply(failure=words))
            with contextlib.suppress(OSError):
                self._connection.sendall(protocol.header(reply) + reply)
        else:
            with contextlib.suppress(OSError):
                self._connection.sendall(DEVICE_FAILED)
        if self._followers is not None:
            self._followers.end()
        self._place.forget()
        logging.shutdown()
        os._exit(protocol.EXIT_DEVICE_FAILED)  # nothing is left to be released in order: that asks the device again

    def _execute(self, command: protocol.Command) -> Any:
        if isinstance(command, protocol.Start):
            return self._start(command)
        trainer = self._trainer
        if trainer is None:
            raise EngineError("the trainer has not been started", reason="TrainerError")
        match command:
            case protocol.Create():
                return trainer.create(command.adapter, command.config)
            case protocol.Load():
                return trainer.load(
                    command.adapter,
                    Path(command.directory),
                    optimizer=command.optimizer,
                    config=command.config,
                    frozen=command.frozen,
                )
            case protocol.Joined():
                return self._forward_backward(trainer, command)
            case protocol.Forward():
                return trainer.forward(command.adapter, command.rows, temperature=command.temperature)
            case protocol.OptimStep():
                return trainer.optim_step(command.adapter, command.adam)
            case protocol.Save():
                return trainer.save(command.adapter, Path(command.directory), optimizer=command.optimizer)
            case protocol.Export():
                return trainer.export(command.adapter, Path(command.directory))
            case protocol.Delete():
                return trainer.delete(command.adapter)

    def _forward_backward(self, trainer: Trainer, command: protocol.Joined) -> list[protocol.Reply]:
        read = [self._request(call) for call in command.calls]
        made = iter(
            trainer.forward_backward_joined([one for one in read if isinstance(one, Request)], then=command.then)
        )
        replies = []
        for one in read:
            outcome = next(made) if isinstance(one, Request) else one
            if not isinstance(outcome, Exception):
                replies.append(protocol.Reply(result=msgspec.Raw(self._encoder.encode(outcome))))
            else:
                replies.append(_failed(outcome))
        return replies

    def _request(self, call: msgspec.Raw) -> Request | UserError:
        """What cannot be read is the answer to its own call, not to those that joined it."""
        try:
            read = self._call_decoder.decode(call)
        except msgspec.DecodeError as error:
            return UserError(f"the batch cannot be read: {error}", field="rows")
        return Request(read.adapter, read.rows, read.loss)

    def _start(self, command: protocol.Start) -> protocol.StartInfo:
        started = time.perf_counter()
        place = self._place
        own = {"model_path": place.model, "spill_directory": place.spill_directory}
        command = msgspec.structs.replace(command, **{name: path for name, path in own.items() if path is not None})
        found = self._device(command)
        ranks = Ranks.join(
            place.rank,
            place.processes,
            place.meeting,
            found,
            in_step=command.shard_base,
            on_lost=None if self._followers is None else self._followers.lost,
        )
        assert isinstance(found, torch.device)  # a rank without one has not joined
        device = found
        with ranks.together():
            most = self._plan(command, device)
        with ranks.together():
            base = load_base(
                command.model_path,
                dtype=command.dtype,
                device=device,
                gradient_checkpointing=command.gradient_checkpointing,
                ranks=ranks,
            )
        with ranks.together():
            trainer = Trainer(
                base,
                model_name=command.model_name,
                max_rank=command.max_rank,
                tokens_per_microbatch=command.tokens_per_microbatch,
                host_limit_bytes=command.host_limit_bytes // place.node_processes,
                spill_directory=None if command.spill_directory is None else Path(command.spill_directory),
                ranks=ranks,
            )
        if command.slots is None:
            choice = choose(trainer, min(ranks.gather(most, int)), clock=ranks.clock)
        else:
            # Asked for by number: whoever waits at the same time is joined.
            choice = Choice(command.slots, command.tokens_per_microbatch * ranks.size if command.slots > 1 else 0)
        with ranks.together():
            trainer.slots = choice.slots
        self._trainer = trainer
        info = protocol.StartInfo(
            base_parameters=sum(parameter.numel() for parameter in base.model.parameters()),
            vocabulary=base.vocabulary,
            max_positions=base.max_positions,
            linear_layers=len(base.layers),
            load_seconds=time.perf_counter() - started,
            slots=choice.slots,
            join_below=choice.join_below,
        )
        log.info("%s ready on %d x %s in %.1f s", command.model_name, place.processes, device.type, info.load_seconds)
        return info

    def _device(self, command: protocol.Start) -> torch.device | UserError:
        if command.device == "cpu":
            return torch.device("cpu")
        needed = self._place.node_processes
        found = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if found < needed:
            beside = f"on node {self._place.node}" if self._place.node else "beside the sampler's"
            return UserError(
                f"the trainer needs {needed} GPUs {beside}, and torch finds {found}",
                field="trainer.gpus",
            )
        return torch.device("cuda", self._place.local_rank)

    def _plan(self, command: protocol.Start, device: torch.device) -> int:
        """The slots that fit, at most as many as there will be adapters. Raises UserError when the trainer does not."""
        check_checkpoint(command.model_path, command.dtype)
        shapes = BaseShapes.of_model(Path(command.model_path))
        # Every process holds all adapters, and on a CPU its own base model too. A sampler is on the first node only.
        here, leads = self._place.node_processes, self._place.node == 0
        known = command.host_free_bytes if leads else None
        free, host_free = device_free(device), (host_memory()[1] if known is None else known) // here
        plan = MemoryPlan.of(
            shapes,
            bytes_per_parameter=DTYPES[command.dtype].itemsize,
            max_rank=command.max_rank,
            slots=(command.slots or 1) + (device.type == "cuda"),
            adapters=command.max_adapters,
            host_limit=command.host_limit_bytes // here,
            shards=self._place.processes if command.shard_base else 1,
            sampler_copies=command.sampler_copies if leads else 0,
            sampler_kv=command.sampler_kv_bytes if leads else 0,
            processes=here,
        )
        plan.check(device_free=free, host_free=host_free)
        log.info("memory planned: %s", plan)
        room = host_free - plan.beside if free is None else free
        return plan.slots_that_fit(command.max_adapters, device_free=room, share=AUTO_SLOTS_SHARE)

    def _receive(self) -> bytearray | None:
        head = self._receive_exactly(protocol.LENGTH.size)
        return None if head is None else self._receive_exactly(*protocol.LENGTH.unpack(head))

    def _receive_exactly(self, count: int) -> bytearray | None:
        data = bytearray(count)
        view = memoryview(data)
        while view:
            received = self._connection.recv_into(view)
            if received == 0:
                return None
            view = view[received:]
        return data


def _failed(error: Exception) -> protocol.Reply:
    """One command's error as its answer."""
    if isinstance(error, OSError):  # a full disk, say
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        reason = "StorageFull" if full else "StorageFailed"
        error = CheckpointError(f"{error.filename}: {error.strerror}", reason=reason)
    elif not isinstance(error, EngineError):
        log.error("a command failed by a bug", exc_info=error)
    return protocol.Reply(failure=protocol.failure_of(error))


def exit_with_parent(others: list[HasFileno], clean_up: Callable[[], None]) -> None:
    """Ends this process at once when the other side of one of these closes, even in the middle of a long computation: a
    trainer without its engine would hold the device that the next engine needs."""

    def end() -> None:
        clean_up()
        os._exit(0)

    when_closed(others, end)


def main(arguments: list[str]) -> None:
    """Serves on the inherited file descriptor until it is closed."""
    parser = argparse.ArgumentParser(prog="clora_engine.trainer_process", description=__doc__.partition("\n")[0])
    parser.add_argument("--fd", type=int, required=True, help="inherited stream socket to serve")
    parser.add_argument("--lifeline-fd", type=int, default=None, help="inherited pipe, closed by a parent that ends")
    parser.add_argument(
        "--follower", type=_follower, action="append", default=[], metavar="RANK=FD", help="of another node, to rank 0"
    )
    Place.add_arguments(parser)
    options = parser.parse_args(arguments)
    place = Place.of(options)
    logging.basicConfig(
        stream=sys.stderr,
        level=logging.WARNING if place.local_rank else logging.INFO,  # all ranks say the same
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
    )
    torch.set_num_threads(place.threads)
    # Bit-for-bit resume needs it on a GPU; operations without a deterministic form warn rather than fail.
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    connection = socket.socket(fileno=options.fd)
    followers = None
    if place.rank == 0 and place.processes > 1:
        place = replace(place, meeting=place.meeting or FileMeeting.anywhere())
        followers = Followers(place, {rank: socket.socket(fileno=fd) for rank, fd in options.follower})
    clean_up = place.forget if followers is None else followers.end
    lifeline = [] if options.lifeline_fd is None else [os.fdopen(options.lifeline_fd, "rb")]
    exit_with_parent([connection, *lifeline], clean_up)
    TrainerServer(connection, place=place, followers=followers).serve()
    clean_up()  # here too: this thread's return ends the other


def _follower(text: str) -> tuple[int, int]:
    rank, _, fd = text.partition("=")
    return int(rank), int(fd)


if __name__ == "__main__":
    main(sys.argv[1:])
