"""A player in a process of its own: ``python -m tests.gpu.roles KIND DESCRIPTOR ORDINAL``."""

import socket
import sys
from collections.abc import Callable

from tests.gpu.library_players import NixlPlayer, TorchPlayer
from tests.gpu.player import Player
from tests.gpu.results import SkippedError, shorten
from tests.gpu.wire import ClosedError, close_fds, receive, send

KINDS: dict[str, Callable[..., Player]] = {
    "plain": Player,
    "torch": TorchPlayer,
    "nixl": NixlPlayer,
}


def main() -> None:
    """Answer commands until the other end is closed."""
    kind, fd, ordinal = sys.argv[1:]
    sock = socket.socket(fileno=int(fd))
    try:
        player = KINDS[kind](ordinal=int(ordinal))
    except SkippedError as error:
        receive(sock)
        send(sock, {"skipped": str(error)})
        return
    while True:
        try:
            message, fds = receive(sock)
        except ClosedError:
            player.close()
            return
        answer_one(player, sock, message, fds)


def answer_one(
    player: Player, sock: socket.socket, message: dict[str, object], fds: list[int]
) -> None:
    """Answer a command with its result, or with what went wrong."""
    command = str(message.pop("command"))
    try:
        answer, answer_fds = player.answer(command, message, fds)
    except SkippedError as error:
        send(sock, {"skipped": str(error)})
    except Exception as error:  # noqa: BLE001 (whatever a library throws is an answer)
        send(sock, {"error": shorten(f"{command}: {type(error).__name__}: {error}")})
    else:
        send(sock, answer, answer_fds)
    finally:
        close_fds(fds)


if __name__ == "__main__":
    main()
